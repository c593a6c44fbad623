# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What many ranks cost, as recorded, is within its bounds; and one command measures it."""

import pytest

from scripts.report.records import read, read_record
from scripts.report.scale_table import table
from scripts.scale.__main__ import main as measure


def cost(phase: str, what: str, ranks: int = 16_384) -> float:
    lines = read_record("scale").lines
    found = [line for line in lines if (line["phase"], line["what"]) == (phase, what)]
    (line,) = (line for line in found if line["ranks"] == ranks)
    assert line["is_measured"], (phase, what)
    return line["now"]


def test_a_world_of_16384_is_within_the_bounds_that_were_set_for_it():
    assert cost("start", "groups: CPU of a rank") < 2
    assert cost("start", "groups: memory of a rank") < 100
    assert cost("start", "groups: lists of others") == 0
    assert cost("save", "plan checked: CPU of rank 0") < 60
    assert cost("save", "plan checked: memory of rank 0") < 8000
    assert (
        cost("load", "index read: CPU of a rank") + cost("load", "own parts found: CPU of a rank")
        < 2
    )
    assert cost("load", "index read: memory of a rank") < 200
    assert cost("failure", "store: bytes") < 50
    assert cost("failure", "last rank's line") < 10


def test_nothing_but_the_store_grows_with_the_ranks():
    lines = [line for line in read_record("scale").lines if line["is_measured"]]
    names = {(line["phase"], line["what"]) for line in lines}
    growing = {
        name
        for name in names
        if name[0] != "failure" and cost(*name, 98_304) > 4 * cost(*name, 4096) + 0.01
    }
    assert len(names) > 10 and growing == set()


@pytest.mark.slow
def test_one_command_measures_all_that_is_recorded(tmp_path, capfd):
    file = tmp_path / "scale.jsonl"
    argv = ["--ranks", "64,128", "--model", "8b", "--save-ranks", "8", "--out", str(file)]
    assert measure(argv) == 0
    lines = [line for line in read([file]) if line["kind"] == "cost"]
    assert table(lines).strip() in capfd.readouterr().out
    recorded = read_record("scale").lines
    assert {(line["phase"], line["what"]) for line in lines} == {
        (line["phase"], line["what"]) for line in recorded
    }
    parts = [line["now"] for line in lines if line["what"] == "parts in the index"]
    assert parts[0] == parts[1]  # as many as the ranks that write
