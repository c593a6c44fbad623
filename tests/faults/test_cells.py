# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Cells of the table of faults: who can still be heard in each, and some of them struck in network
namespaces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.faults.cells import draw_cells
from scripts.testbed import links

ROOT = Path(__file__).parents[2]


def test_whoever_is_cut_off_from_the_rank_that_holds_the_store_is_silent_there():
    """Of both sides of a cut link: the node's ranks, or, of the first node, all others."""
    cut = ("link down", "upload lost", "download lost")
    cells = [cell for cell in draw_cells(0, 20) if cell.fault in cut]
    assert {cell.node for cell in cells} == {0, 1, 2, 3}
    for cell in cells:
        nodes = [rank // cell.ranks for rank in range(cell.world_size)]
        apart = [(node == cell.node) != (cell.node == 0) for node in nodes]
        assert cell.silent == [rank for rank, is_apart in enumerate(apart) if is_apart], cell
        assert [not cell.hears_store(rank) for rank in range(cell.world_size)] == apart, cell


@pytest.mark.slow
@pytest.mark.parametrize("program, stride", [("library", 17), ("megatron", 27)])
def test_every_survivor_of_a_fault_ends_with_its_line_and_the_checkpoint_goes_on(
    tmp_path, program, stride
):
    if (reason := links.unavailable()) is not None:
        pytest.skip(reason)
    out = tmp_path / "faults.jsonl"
    words = f"--program {program} --repeats 1 --first 1 --stride {stride} --cells 3 --limit 8"
    command = ["-m", "scripts.faults", *words.split(), "--out", str(out)]
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stderr
    cells = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert len(cells) == 3
    for cell in cells:
        assert cell["faults"] == [], cell
        assert all(cell["names"].values()), cell
