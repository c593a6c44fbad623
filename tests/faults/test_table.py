# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""No cell of the table of faults is left out, and a bad one is in the status of its command."""

import json
import sys

import pytest

from scripts.faults import __main__ as command
from scripts.faults.cells import Cell
from scripts.faults.run import Bench
from scripts.faults.verdict import Ended, Outcome
from scripts.report import fault_table
from scripts.report.records import read
from tests.faults.test_verdict import outcome

GOOD, MISSED = outcome(), outcome(is_reached=False)


def record(one: Outcome) -> dict:
    return json.loads(json.dumps({"kind": "cell", **one.as_dict()}))


def row(table: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith("| node killed"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_cell_whose_moment_did_not_come_is_counted_and_shown():
    lines = [record(GOOD), record(MISSED)]
    assert row(fault_table.ends(lines, "library"))[1:] == [
        *("2", "2", "2 of 2", "0", "+3.0, 1 not reached")
    ]
    assert fault_table.number_of_cells(lines, "library") == 2
    assert fault_table.number_of_good(lines, "library") == 1
    assert fault_table.number_of_good(lines[1:], "library") == 0


@pytest.mark.parametrize("is_reached", [True, False])
def test_the_command_ends_with_a_status_where_a_cell_is_not_good(
    is_reached, tmp_path, monkeypatch, capsys
):
    def run(bench: Bench, cell: Cell) -> Outcome:
        went_on = [Ended(0, 8.0, "", is_done=True)] * cell.world_size
        return Outcome(cell, 5.0, went_on, is_reached or cell.moment != "reduce")

    monkeypatch.setenv("ASYNCHZP_FAULTS_INSIDE", "1")  # no namespaces
    monkeypatch.setattr(command, "Links", lambda *_: None)
    monkeypatch.setattr(Bench, "run", run)
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["faults", "--cells", "3", "--out", str(out)])
    if is_reached:
        command.main()
    else:
        with pytest.raises(SystemExit, match="^faults: 1 of the cells were not good$"):
            command.main()
    assert [line["kind"] for line in read([out])] == ["machine", *["cell"] * 3]
    assert "all cells have run" in capsys.readouterr().out
