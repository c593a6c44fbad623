# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The judge of the table of faults notices every way in which a cell can be bad."""

from dataclasses import replace

import pytest

from scripts.faults.cells import FAULTS, MOMENTS, Cell, draw_cells
from scripts.faults.verdict import Ended, Outcome, faults_of, names_missing, ran_on

CELL = Cell("node killed", "reduce", 2, 2, (2, 2, 4), "threaded", victim=2, visit=3)
LINE = (
    "megatron_asynchzp: rank {}: reduce-scatter of the gradients of blocks.1 over ranks 0, 1 in "
    "step 5 failed: not finished after 5 s; no answer from ranks 2, 3\n"
)


def ended(rank: int, **changed) -> Ended:
    return replace(Ended(1, 8.0, "a traceback\n" + LINE.format(rank)), **changed)


def outcome(*survivors: Ended, **changed) -> Outcome:
    dead = [Ended(-9, 0.1, ""), Ended(-9, 0.1, "")]
    both = list(survivors) or [ended(0), ended(1)]
    return replace(Outcome(CELL, 5.0, [*both, *dead], final_loss="1", expected_loss="1"), **changed)


def test_a_cell_in_which_every_survivor_ended_with_its_line_is_good():
    good = outcome()
    assert faults_of(good) == [] and not ran_on(good)
    assert names_missing(good) == {0: True, 1: True}


@pytest.mark.parametrize(
    "bad, words",
    [
        (outcome(ended(0), ended(1, status=None, after_s=30.0)), "rank 1: still ran"),
        (outcome(ended(0), ended(1, after_s=15.1)), "rank 1: ended 15.1 s after the fault"),
        (outcome(ended(0), ended(1, text="a traceback\n")), "rank 1: 0 lines"),
        (outcome(ended(0), ended(1, text=2 * LINE.format(1))), "rank 1: 2 lines"),
        (outcome(ended(0, status=0), ended(1)), "rank 0: status 0"),
        (
            outcome(ended(0), ended(1, text="megatron_asynchzp: rank 1: OddError\n")),
            "rank 1: a line without operation, unit and ranks: OddError",
        ),
        (outcome(processes=["python writer"]), "left: python writer"),
        (outcome(final_loss=None, checkpoint=3), "went on to the loss None from checkpoint 3"),
        (outcome(final_loss="2"), "went on to the loss 2"),
        (outcome(is_reached=False), "the moment was not reached"),
    ],
)
def test_every_bad_end_is_noticed(bad, words):
    assert len(faults_of(bad)) == 1 and faults_of(bad)[0].startswith(words)


def test_a_record_names_a_checkpoint_without_the_folder_of_the_machine():
    line = (
        "megatron_asynchzp: rank {}: the save of /tmp/x1/run3/checkpoints/iter_0000006 failed: no\n"
    )
    seen = outcome(*(ended(rank, text=line.format(rank)) for rank in (0, 1)))
    lines = [one["lines"] for one in seen.as_dict()["ended"]]
    assert lines[:2] == [["the save of checkpoints/iter_0000006 failed: no"]] * 2
    assert faults_of(seen) == []


def test_a_run_that_goes_on_is_good_where_it_comes_to_the_right_end():
    done = [Ended(0, 3.0, "", is_done=True) for _ in range(4)]
    slow = Outcome(replace(CELL, fault="link at 1%"), 5.0, done, final_loss="1", expected_loss="1")
    assert ran_on(slow) and faults_of(slow) == []
    assert len(faults_of(replace(slow, final_loss="2"))) == 1


def test_a_line_that_names_other_ranks_or_a_store_that_is_there_is_not_counted_as_naming():
    other = LINE.format(0).replace("ranks 2, 3", "rank 2")
    gone = LINE.format(1).partition("no answer")[0] + "the store at a:1, ..., does not answer\n"
    assert names_missing(outcome(ended(0, text=other), ended(1, text=gone))) == {0: False, 1: False}
    first = replace(CELL, fault="first node killed", victim=0)
    dead = [Ended(-9, 0.1, ""), Ended(-9, 0.1, "")]
    seen = Outcome(first, 5.0, [*dead, ended(2), ended(3, text=gone.replace("rank 1", "rank 3"))])
    assert names_missing(seen) == {2: False, 3: True}


def test_every_fault_meets_every_moment_and_the_same_seed_gives_the_same_cells():
    cells = list(draw_cells(seed=1, repeats=2))
    assert cells == list(draw_cells(seed=1, repeats=2)) != list(draw_cells(seed=2, repeats=2))
    pairs = {(cell.fault, cell.moment) for cell in cells}
    assert pairs == {(fault, moment) for fault in FAULTS for moment in MOMENTS}
    for cell in cells:
        assert (0 in cell.dead) == (cell.fault == "first node killed" or cell.dead == [0])
        assert cell.fault != "node killed" or 0 not in cell.dead
