# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of the checks that only a GPU runs, with stand-ins for torch.cuda: that they do what
they are to do there, not that a GPU does."""

import warnings
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

from scripts.gpu_check import loopback, loopback_world, node_row, synchronisations
from scripts.gpu_check.loopback import Case
from scripts.gpu_check.outcome import CheckFailed, Place
from scripts.gpu_check.process import Ended
from tests.support.inert_streams import inert_streams

CPU = torch.device("cpu")


@pytest.mark.parametrize("schedule", loopback.ON_STREAMS)
def test_collectives_on_streams_and_late_gradients_train_as_a_plain_process(schedule):
    shape = replace(loopback.variants(is_cuda=False)["plain"], has_side_stream=True, late_s=0.01)
    case = Case("side stream", (2, 4, 8), schedule, 1)
    with inert_streams() as calls:
        with mock.patch.object(loopback_world, "new_lane", loopback_world._StreamLane):
            assert loopback.run_cases([(case, shape)], CPU)["cases"] == 1
    assert calls["sleep"] > 50  # before each collective, and in each late backward
    assert calls["wait_event"] > 50
    assert calls["record"] > 50


@pytest.mark.filterwarnings("ignore")  # those of the steps that are not counted
def test_implicit_waits_are_counted_by_their_line():
    def operate() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    where: Counter[str] = Counter()
    modes = []
    with (
        mock.patch.object(torch.cuda, "get_sync_debug_mode", lambda: 0),
        mock.patch.object(torch.cuda, "set_sync_debug_mode", modes.append),
    ):
        assert synchronisations.per_step(operate, where) == 1.0
    assert modes == ["warn", 0]
    (line,) = where
    assert line.startswith("test_on_streams.py:")


ITERATION = (
    " [2026-11-22 01:44:56] iteration {step:8d}/      10 | consumed samples:           16 | "
    "elapsed time per iteration (ms): {ms} | learning rate: 9.4E-04 | lm loss: {loss}E+00 | "
    "grad norm: 2.046 | exposed comm (ms): 1.5 | overlap (%): 90.0 |"
)


def row_log(ms: float, loss: float, steps: int = node_row.STEPS) -> str:
    return "\n".join(ITERATION.format(step=i + 1, ms=ms, loss=loss) for i in range(steps))


def run_rows(folder, of_row) -> dict:
    """The check, where launch.sh prints `of_row(row, env)`."""

    def run_command(command, log, limit_s, env):
        log.write_text(of_row(command[2], env))
        return Ended(0, 1.0, log)

    with mock.patch.object(node_row, "run_command", run_command):
        return node_row.run(Place("cuda", 8, folder))


def test_the_row_of_a_node_compares_every_setting_with_stock(tmp_path):
    limits = []

    def of_row(row, env):
        limits.append(env.get("NCCL_MAX_CTAS"))
        return row_log(100.0 if row == node_row.STOCK else 120.0, 9.5)

    figures = run_rows(tmp_path, of_row)
    assert limits == [None, None, "16", "8", None]
    assert figures["ours, 8 channels"]["step ratio"] == pytest.approx(1.2)
    assert figures["ours"]["exposed ms"] == 1.5


@pytest.mark.parametrize(
    "ours, words",
    [(row_log(90.0, 8.0), "first loss"), (row_log(90.0, 9.5, steps=4), "4 of 10 steps")],
)
def test_a_row_that_differs_or_ends_early_fails(tmp_path, ours, words):
    with pytest.raises(CheckFailed, match=words):
        run_rows(tmp_path, lambda row, _: row_log(90.0, 9.5) if row == node_row.STOCK else ours)
