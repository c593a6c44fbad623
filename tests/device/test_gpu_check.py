# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The checks of scripts/gpu_check on the emulated device, started as on a machine with GPUs: the
command knows nothing of the emulation."""

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_asynchzp.engine.comm.order_check import OrderMismatch
from megatron_asynchzp.engine.comm.task import Task
from scripts.gpu_check import loopback, low_precision, synchronisations
from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.gpu_check.table import CHECKS, RECIPE_NAMES
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.te.environment import te_folder
from tests.device.test_transformer_engine import BLACKWELL
from tests.support.selection import slow_unless

ROOT = Path(__file__).resolve().parents[2]
ON_ONE = [check.name for check in CHECKS if check.gpus == 1 and check.name not in RECIPE_NAMES]


def run(folder: Path, num_devices: int, names: list[str], *laws: str) -> dict[str, dict]:
    """The rows of the result, by check."""
    result = folder / "result.json"
    # fmt: off
    command = [sys.executable, "-m", "scripts.testbed.device", "--devices", str(num_devices), *laws,
               "--", "-m", "scripts.gpu_check", "--only", ",".join(names),
               "--json", str(result), "--markdown", str(folder / "result.md")]
    # fmt: on
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.exists(), ended.stderr[-3000:]
    found = json.loads(result.read_text())
    assert found["machine"]["gpus"] == ["emulated CUDA device"] * num_devices
    rows = {row["check"]: row for row in found["checks"]}
    assert list(rows) == names
    assert ended.returncode == any(row["status"] == "failed" for row in rows.values())
    return rows


@pytest.mark.parametrize(
    ("num_devices", "names"),
    [
        slow_unless(False, 1, ON_ONE, id="1"),
        slow_unless(False, 2, ["parity_2", "registered"], id="2"),
        slow_unless(False, 4, ["parity_4"], id="4"),
        slow_unless(False, 4, ["model_parallel"], id="4, model parallel"),
    ],
)
def test_every_check_passes_on_the_emulated_device(
    worlds: DeviceWorlds, tmp_path: Path, num_devices: int, names: list[str]
):
    rows = run(tmp_path, num_devices, names)
    assert [row for row in rows.values() if row["status"] != "passed"] == []


@pytest.mark.slow
def test_memory_that_nccl_gives_no_window_for_fails_the_check(
    worlds: DeviceWorlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NCCL_WIN_ENABLE", "0")
    row = run(tmp_path, 2, ["registered"])["registered"]
    assert row["status"] == "failed" and "NCCL gave no window" in row["reason"]


NEEDS_MORE = "needs a GPU of compute capability 10.0, this one has 9.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "major", "names"),
    [(1, 9, RECIPE_NAMES), (2, 10, ("tensorwise", "mxfp8", "nvfp4"))],
)
def test_each_recipe_has_a_check_that_passes_or_says_what_gpu_it_needs(
    te_worlds: DeviceWorlds,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_devices: int,
    major: int,
    names: tuple[str, ...],
):
    """Each with the parts of Transformer Engine that are not its kernels."""
    paths = [str(te_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("GPU_CHECK_PRELOAD", "scripts.testbed.te.preload")
    monkeypatch.setenv("ASYNCHZP_DEVICE_MAJOR", str(major))
    rows = run(tmp_path, num_devices, [*names])
    reasons = {name: row["reason"] for name, row in rows.items() if row["status"] != "passed"}
    assert reasons == (dict.fromkeys(("mxfp8", "nvfp4"), NEEDS_MORE) if major < 10 else {})
    # Rows and columns of 512 x 1024: a code of a byte or of half of one, and a scale of 32 or 16.
    counts = {name: row["figures"].get("codes compared") for name, row in rows.items()}
    numbers = {"mxfp8": 2 * 2**19 * 33 // 32, "nvfp4": 2 * 2**19 * 9 // 16}
    for name in set(counts) - set(reasons):
        assert counts[name] == numbers.get(name, 0)


def codes_without_224_as_225(name: str) -> str:
    """The report of a gather that decodes code 224 as its value."""
    from megatron_asynchzp.engine.comm import block_formats

    def decode(_: object, codes: torch.Tensor, factors: torch.Tensor, __: object, out: Any) -> None:
        exponents = factors.view(torch.float8_e8m0fnu).float()
        torch.mul(codes.view(block_formats.FP8).float(), exponents, out=out)

    with (
        mock.patch.object(block_formats.Mxfp8, "decode", decode),
        pytest.raises(CheckFailed) as failed,
    ):
        low_precision.compare_codes(name)
    return str(failed.value)


@pytest.mark.slow
def test_a_gather_after_which_the_gpu_makes_other_codes_fails_the_check(te_worlds: DeviceWorlds):
    [report] = te_worlds.run(codes_without_224_as_225, 1, "mxfp8", env=BLACKWELL)
    assert report.startswith("Mxfp8(rows=1, columns=32): ") and "rowwise data differ" in report


def _without_wait(lane: str) -> AbstractContextManager:
    """The thread that computes does not wait for the tasks of `lane`."""
    wait = Task.wait

    def wait_unless_left_out(task: Task) -> None:
        if task.lane != lane:
            wait(task)
        else:
            task.await_usable()

    return mock.patch.object(Task, "wait", wait_unless_left_out)


FAULTS = {
    "none": nullcontext,
    "a wait for a gather": lambda: _without_wait("gather"),
    "a wait for a reduction": lambda: _without_wait("reduce"),
}


def loopback_finds() -> dict[str, str | None]:
    """Return the loopback world's report on the engine with each fault.

    On a busy machine the thread that computes may be late by more than the usual delays and then
    read correct values without a wait, so these delays are longer and a fault has three tries.
    """
    loopback.LONGEST_DELAY_S["cuda"] = 0.03
    shape, device = loopback.variants(is_large=False)["plain"], torch.device("cuda", 0)
    case = loopback.Case("plain", (2, 4, 8), "main-thread", 1)

    def report(rank: int) -> str | None:
        try:
            return loopback.first_difference(loopback.train_both(case, shape, device, rank))
        except OrderMismatch as error:
            return str(error)

    found = {}
    for name, fault in FAULTS.items():
        with fault():
            ranks = (5,) if name == "none" else (5, 2, 7)
            found[name] = next(filter(None, map(report, ranks)), None)
    return found


def test_the_loopback_world_finds_faults_that_only_a_device_shows(worlds: DeviceWorlds):
    # The watch of the emulated device would end the process before the check says anything.
    [found] = worlds.run(loopback_finds, 1, timeout_s=120, watches=False)
    assert found.pop("none") is None
    assert [name for name, report in found.items() if report is None] == []


def waits_of_one_step(target: Target) -> dict:
    synchronisations._WARM_UP, synchronisations._STEPS = 2, 1
    return synchronisations.run(target)


def test_the_engine_never_holds_the_host_within_a_step(worlds: DeviceWorlds, tmp_path: Path):
    [figures] = worlds.run(waits_of_one_step, 1, Target("cuda", 1, tmp_path))
    assert [found["per step"] for found in figures.values()] == [0.0, 0.0]
