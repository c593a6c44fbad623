# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The long run's course of failures, what it accepts of ranks that end, and a short one whole."""

import math
from collections import Counter

import pytest

from scripts.bench.long_training import (
    COURSE,
    SEED,
    Start,
    TrainingError,
    check_repeats,
    check_statuses,
    course,
    main,
    starts_of,
)
from scripts.report.long_training import goodput, markdown
from scripts.report.records import read
from scripts.testbed.launches import Ended

TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
TINY += "--max-position-embeddings 16 --eval-iters 1"


def test_one_failure_strikes_in_each_interval_and_every_kind_comes():
    starts = course(2000, 150, seed=1234)
    *failing, last = starts
    assert len(failing) == 13 and last.fault == "" and last.label == failing[0].label
    for number, start in enumerate(failing):
        assert 150 * number + 75 <= start.step <= 150 * (number + 1)
        assert start.victims and all(0 <= rank < start.ranks for rank in start.victims)
    kinds = {"kill", "damage", "node lost", "signal", "full disk", "hugging face"}
    assert {start.fault for start in failing} == kinds
    assert {start.ranks for start in failing} == {2, 4, 8}
    assert Counter(start.label for start in failing)["stock"] == 1
    assert starts == course(2000, 150, seed=1234) != course(2000, 150, seed=1235)


def test_a_lost_node_is_half_of_the_ranks_and_a_full_disk_that_of_all():
    struck = {start.fault: start for start in course(2000, 150, seed=7)}
    assert struck["node lost"].victims == (2, 3)
    assert struck["full disk"].victims == (0, 1, 2, 3)
    assert len(struck["kill"].victims) == 1


STARTS = [Start(2, "a", ()), Start(2, "b", ()), Start(2, "a", ())]


def step(start: int, number: int, loss: float) -> dict:
    return {"kind": "step", "start": start, "step": number, "loss": loss, "norm": 1.0}


def test_a_step_that_is_made_again_on_the_same_sizes_has_the_same_bits():
    notes = [step(0, 1, 2.5), step(0, 2, 2.25), step(1, 2, 2.2500001), step(2, 2, 2.25)]
    assert check_repeats(notes, STARTS) == 1
    with pytest.raises(TrainingError, match="step 2 again"):
        check_repeats([*notes, step(2, 2, 2.2500001)], STARTS)


LINE = "megatron_asynchzp: rank 1: lost rank 0"
FULL = "megatron_asynchzp: could not be saved; earlier checkpoints are as they were"


@pytest.mark.parametrize(
    "fault, ended, is_good",
    [
        ("kill", [Ended(-9, ""), Ended(1, LINE)], True),
        ("kill", [Ended(-9, ""), Ended(1, "Traceback")], False),
        ("kill", [Ended(-9, ""), Ended(0, LINE)], False),
        ("kill", [Ended(1, LINE), Ended(1, LINE)], False),
        ("signal", [Ended(0, ""), Ended(0, "")], True),
        ("signal", [Ended(0, ""), Ended(1, LINE)], False),
        ("full disk", [Ended(1, FULL), Ended(1, LINE)], True),
        ("full disk", [Ended(1, LINE), Ended(1, LINE)], False),
        ("", [Ended(0, ""), Ended(0, "")], True),
        ("", [Ended(0, ""), Ended(-9, "")], False),
    ],
)
def test_ranks_end_as_their_failure_explains_or_the_run_stops(fault, ended, is_good):
    start = Start(2, "ours", (), fault, victims=(0,))
    if is_good:
        check_statuses(start, ended)
    else:
        with pytest.raises(TrainingError, match="rank "):
            check_statuses(start, ended)


@pytest.mark.slow
def test_a_short_run_of_each_kind_goes_through_its_failures_to_the_end(tmp_path):
    steps, every = 44, 4
    words = ["--steps", str(steps), "--every", str(every), "--save-every", "2"]
    words += ["--folder", str(tmp_path / "runs"), "--flags", TINY]
    words += ["--runs", "stock-1", "ours", "failures", "pasa"]
    out = tmp_path / "out.jsonl"
    assert main([*words, "--out", str(out)]) == 0
    _, *lines = read([out])
    starts = [line for line in lines if line["kind"] == "start" and line["run"] == "failures"]
    assert [line["fault"] for line in starts][: len(COURSE)] == [fault for _, fault in COURSE]
    for run in ("stock-1", "ours", "failures", "pasa"):
        own = [line for line in lines if line["run"] == run]
        assert [line["step"] for line in own if line["kind"] == "step"] == [10, 20, 30, 40]
        assert [line["step"] for line in own if line["kind"] == "validation"][-1] == steps
    file = tmp_path / "runs" / "failures" / "notes.jsonl"
    assert check_repeats(read([file]), course(steps, every, SEED)) > 0
    last = {line["run"]: line["loss"] for line in lines if line["kind"] == "validation"}
    assert last["ours"] == pytest.approx(last["stock-1"], rel=1e-3)
    assert last["failures"] == pytest.approx(last["ours"], rel=1e-3)
    notes = file.read_bytes()
    assert main([*words, "--every", "5"]) == 1  # other settings than the folder's
    assert main(words) == 0  # all is done: nothing trains
    assert file.read_bytes() == notes


@pytest.mark.parametrize("words", [["--every", "2"], ["--steps", "100"], ["--runs", "no"]])
def test_a_run_that_cannot_be_is_refused_in_a_line(words, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--folder", str(tmp_path)])
    assert ended.value.code == 2 and "long_training: error: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- what the failures cost


def noted(start: int, began: float, steps: dict[int, float], struck: float | None) -> list[dict]:
    lines = [{"kind": "began", "start": start, "at": began, "step": min(steps) - 1}]
    lines += [{"kind": "step", "start": start, "step": s, "at": at} for s, at in steps.items()]
    return lines + ([{"kind": "struck", "start": start, "at": struck}] if struck else [])


def test_seconds_and_steps_that_a_failure_cost_follow_from_the_notes():
    first = noted(0, 10.0, {1: 11.0, 2: 12.0, 3: 15.0, 4: 16.0, 5: 17.0}, struck=17.5)
    second = noted(1, 30.0, {3: 32.0, 4: 33.0, 5: 36.0, 6: 37.0}, struck=None)
    about = {"ranks": 2, "label": "ours"}
    ended = [
        {"start": 0, "fault": "kill", "began_at": 4.0, "ended_at": 19.0} | about,
        {"start": 1, "fault": "", "began_at": 20.0, "ended_at": 40.0} | about,
    ]
    one, two = starts_of([*first, *second], ended, save_every=2)
    assert (one["from"], one["to"], one["repeated"]) == (0, 5, 0)
    assert (two["from"], two["to"], two["repeated"]) == (2, 6, 3)
    assert (one["start_s"], one["first_step_s"], one["to_the_end_s"]) == (6.0, 1.0, 1.5)
    assert (two["start_s"], two["first_step_s"], two["to_the_end_s"]) == (10.0, 2.0, None)
    # After the save of step 2 came 3 s and not 1 s; that of step 4 nothing, and in the second 2 s.
    assert (one["step_s"], one["save_s"], one["wall_s"]) == (1.0, 1.0, 15.0)
    assert (two["step_s"], two["save_s"]) == (1.0, 2.0)


def test_goodput_is_the_time_of_the_steps_that_count_over_all_time():
    about = {"kind": "start", "run": "failures", "step_s": 1.0, "save_s": 0.0, "start_s": 5.0}
    about |= {"first_step_s": 1.0, "fault": "kill", "to_the_end_s": 3.0, "save_every": 20}
    starts = [about | {"from": 0, "to": 60, "repeated": 0, "wall_s": 68.0}]
    starts += [about | {"from": 50, "to": 110, "repeated": 10, "wall_s": 68.0}]
    starts += [about | {"from": 100, "to": 140, "repeated": 10, "wall_s": 45.0}]
    starts[-1] |= {"fault": "", "to_the_end_s": None}
    measured, planned = goodput(starts)
    assert measured == pytest.approx(140 / 181)
    # Daly: t exp(-t / M) / (M (1 - exp(-t / M))), of 20 s between saves and 80 s between failures,
    # in the 160 of 181 s that are not between a failure and the first step after it.
    assert planned == pytest.approx(20 / 80 / (math.exp(20 / 80) - 1) * 160 / 181)


def test_a_row_has_what_a_run_and_the_seeds_had_at_its_last_step():
    def noted_losses(run: str, kind: str, losses: dict[int, float]) -> list[dict]:
        return [{"run": run, "kind": kind, "step": s, "loss": loss} for s, loss in losses.items()]

    lines = []
    for run, apart in (("stock-1", 0.0), ("stock-2", 0.25), ("stock-3", 0.125)):
        lines += noted_losses(run, "step", {10: 4 + apart, 20: 2 + apart, 30: 1.5 + apart})
        lines += noted_losses(run, "validation", {15: 3 + apart, 30: 1.75 + apart})
    lines += noted_losses("ours", "step", {20: 2.5, 10: 4.0, 30: 1.0})
    lines += noted_losses("ours", "validation", {30: 1.625})
    lines += noted_losses("fp8", "step", {10: 4.5, 20: 2.25})
    *_, ours, fp8 = markdown(lines).splitlines()
    # Training losses are means of the losses so far: at most 5.
    assert ours.split("|")[2:-1] == [
        *(" 30 ", " 2.5000 ", " 2.5000 to 2.7500 "),
        *(" 1.6250 ", " 1.7500 to 2.0000 ", " 0 "),
    ]
    assert fp8.split("|")[2:-1] == [" 20 ", " 3.3750 ", " 3.0000 to 3.2500 ", "  ", "  ", " 0 "]
