# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint from before the optimizer's first step, which fp16 may skip many times until it has
found its loss scale, is one like any other: it holds moments of zero."""

from pathlib import Path

import pytest
import torch

from scripts.testbed.megatron_flags import FP16
from scripts.testbed.megatron_runs import RunRecord, run_pretrain
from tests.mcore.checkpoint.test_moments import ROUNDED
from tests.support.checkpoints import NUM_STEPS, SAVED_AT, Job, find_differences, state_of
from tests.support.selection import some_and_rest
from tests.support.world import on_ranks

# The first SAVED_AT steps overflow, the last ones do not.
LATE = (*FP16, "--initial-loss-scale", "1048576", "--hysteresis", "2")
# Megatron has no gradient scaler for Muon.
PASSED_OVER = ("--iterations-to-skip", *(str(step + 1) for step in range(SAVED_AT)))
BF16_MOMENTS = ROUNDED[1:-2]  # without --bf16 and --main-grads-dtype, which needs it
FLAGS = {
    "adam": LATE,
    "adam with moments in bf16": (*LATE, *BF16_MOMENTS),
    "sgd with momentum": (*LATE, "--optimizer", "sgd", "--lr", "0.1"),
    "muon": ("--bf16", "--optimizer", "muon", *PASSED_OVER),
}
SIZES = (1, 2, 2)


def by_number(run: RunRecord) -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in enumerate(run.inspected)}


def save_and_resume(names: list[str], folder: Path) -> dict[str, dict]:
    output = {}
    for name in names:
        job, place = Job(SIZES, FLAGS[name]), folder / name.replace(" ", "_")
        whole = run_pretrain(job.argv(), inspect=state_of)
        save = ("--save", str(place), "--save-interval")
        saving = run_pretrain(job.argv(*save, "1"), inspect=state_of)
        if name == "muon":  # Megatron saves after an iteration that it passes over at the end only
            run_pretrain(job.argv(*save, "99", "--train-iters", str(SAVED_AT)))
        # In megatron-core 0.20 --override-opt_param-scheduler, which resume() gives, counts steps
        # that were skipped.
        step = ("--load", str(place), "--ckpt-step", str(SAVED_AT))
        if name == "muon":
            rest = job.resume(place)
        else:
            rest = run_pretrain(job.argv(*step), inspect=state_of)
        output[name] = {
            "skipped": [step.is_skipped for step in whole.steps],
            "steps": [run.steps[SAVED_AT - NUM_STEPS :] for run in (whole, saving, rest)],
            "differences": [
                difference
                for run in (saving, rest)
                for difference in find_differences(by_number(whole), by_number(run))
            ],
        }
    return output


@pytest.mark.parametrize("names", some_and_rest(FLAGS, ["adam"]))
def test_saving_changes_no_run_and_resuming_repeats_it_bit_by_bit(names, tmp_path):
    for output in on_ranks(save_and_resume, 2, names, tmp_path):
        for name, found in output.items():
            whole, saving, rest = found["steps"]
            assert whole == saving == rest and len(rest) == NUM_STEPS - SAVED_AT, name
            assert found["differences"] == [], name
            if name != "muon":
                assert found["skipped"] == [True] * SAVED_AT + [False] * len(rest), name
