# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m scripts.launch_order` on dumps: its verdict, and one line for what is none."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from scripts.launch_order import __main__
from scripts.launch_order.__main__ import main
from scripts.launch_order.interleavings import Found


def dump_of(launches: list[tuple[str, str]], first: int = 0) -> dict[str, Any]:
    """As torch writes it: (group, operation) of each launch."""
    entries = [
        {
            "record_id": first + index,
            "process_group": (group, "description"),
            "profiling_name": f"nccl:{name}",
            "input_sizes": [[4]],
            "is_p2p": name.startswith(("send", "recv")),
        }
        for index, (group, name) in enumerate(launches)
    ]
    return {"entries": entries, "pg_config": {"0": {"ranks": "[0, 1]"}, "1": {"ranks": "[0, 1]"}}}


def written(folder: Path, *dumps: Any) -> list[str]:
    paths = [folder / f"rank{rank}.pickle" for rank in range(len(dumps))]
    for path, dump in zip(paths, dumps, strict=True):
        path.write_bytes(pickle.dumps(dump))
    return [str(path) for path in paths]


GATHER, REDUCE = ("0", "_all_gather_base"), ("1", "_reduce_scatter_base")


def test_one_order_has_no_circle_and_two_have_one(tmp_path, capsys):
    one = dump_of([GATHER, ("1", "send 0->1"), REDUCE])
    other = dump_of([GATHER, ("1", "recv 1<-0"), REDUCE])
    assert main([*written(tmp_path, one, other), "--queues", "1", "--places", "1"]) == 0
    assert "1 queues, 1 places: no circle, 1 states" in capsys.readouterr().out
    turned = dump_of([REDUCE, ("1", "recv 1<-0"), GATHER])
    assert main([*written(tmp_path, one, turned), "--queues", "1", "--places", "1"]) == 1
    found = capsys.readouterr().out
    assert "rank 0 is in collective number 0 of group 0 of ranks 0 1 and waits for 1" in found


def test_a_search_that_was_ended_is_none_that_found_nothing(tmp_path, capsys, monkeypatch):
    files = written(tmp_path, *[dump_of([GATHER, REDUCE])] * 2)
    for is_all, status in ((True, 0), (False, 3)):
        monkeypatch.setattr(__main__, "search", lambda *_, is_all=is_all: Found((), 1, is_all))
        assert main(files) == status
        assert ("no circle so far" in capsys.readouterr().out) is not is_all


@pytest.mark.parametrize(
    "dumps, line",
    [
        (([],), "no dump of torch's flight recorder"),
        ((dump_of([GATHER], first=3), dump_of([GATHER])), "the first 3 launches are lost"),
        ((dump_of([GATHER, REDUCE]), dump_of([GATHER])), "is not in the files of all its ranks"),
        ((dump_of([]), dump_of([])), "no collectives and no messages"),
    ],
)
def test_what_cannot_be_searched_is_one_line(tmp_path, capsys, dumps, line):
    assert main(written(tmp_path, *dumps)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and line in lines[0]
