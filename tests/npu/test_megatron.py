# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron on emulated NPUs by what the start script brings: pretrain() with stock DDP and with the
engine, local layers, HCCL."""

from pathlib import Path

import pytest
import torch

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from scripts.testbed.megatron_flags import BF16, size_flags
from scripts.testbed.megatron_runs import Steps, gpt_args
from scripts.testbed.ranks import run_ranks
from scripts.train import on_ascend
from tests.device.test_megatron import (
    LAWS,
    LAYOUTS,
    Layout,
    assert_it_goes_on,
    assert_it_moves_from_the_host,
    pretrain_each,
)
from tests.device.test_sleep import asleep_in_megatron
from tests.npu.conftest import StartScriptWorlds

DATA = [(1, 2, 2), (2, 2, 2), (1, 1, 2)]


MUON = ("--optimizer", "muon", "--muon-fp32-matmul-prec", "high")
NPU_LAYOUTS = LAYOUTS | {
    "muon": Layout(2, MUON, (1, 2, 2)),
    "bf16": Layout(2, (*BF16, "--accumulate-allreduce-grads-in-fp32"), (1, 2, 2)),
}


def printed(steps: Steps) -> list[str]:
    """As Megatron's log has them."""
    return [f"{loss:.6E} {norm:.3f}" for loss, norm in steps]


@pytest.mark.slow
@pytest.mark.parametrize("name", NPU_LAYOUTS)
def test_megatron_on_npus_prints_stocks_digits_and_gloos_and_no_delay_changes_a_bit(
    by_start_script: StartScriptWorlds, name: str
):
    layout = NPU_LAYOUTS[name]
    base = gpt_args("--train-iters", "3", *layout.flags)
    choices = DATA if name == "data" else [layout.sizes]
    lines = [base, *([*base, *size_flags(sizes)] for sizes in choices)]
    on_gloo = run_ranks(pretrain_each, layout.world_size, lines, [], timeout_s=300)[0]
    laws = [Delays(), *LAWS]
    seen = by_start_script.run(
        pretrain_each, layout.world_size, lines, laws, timeout_s=550, env=layout.env
    )[0]
    first = seen[: len(lines)]
    for found, expected in zip(first, on_gloo, strict=True):
        assert printed(found) == printed(first[0])
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
    for index in range(1, len(laws)):
        assert seen[index * len(lines) : (index + 1) * len(lines)] == first, str(laws[index])


@pytest.mark.slow
def test_a_run_that_is_saved_on_npus_goes_on_bit_for_bit(
    by_start_script: StartScriptWorlds, tmp_path: Path
):
    assert_it_goes_on(by_start_script, LAYOUTS["data"], tmp_path, LAWS[0])


@pytest.mark.slow
def test_a_sleeping_megatron_leaves_little_on_an_npu_and_wakes_with_what_it_had(
    by_start_script: StartScriptWorlds,
):
    """Its own: scalars of the scaler and of the log, buffers of the model."""
    argv = gpt_args("--train-iters", "4", *size_flags((1, 2, 2)), "--bf16")
    for seen in by_start_script.run(asleep_in_megatron, 2, argv, timeout_s=300):
        assert max(asleep for asleep, _ in seen) < 32768
        assert len({awake for _, awake in seen[1:]}) == 1


@pytest.mark.slow
def test_a_model_that_is_built_on_the_host_trains_on_the_device_where_stock_leaves_it_behind(
    by_start_script: StartScriptWorlds,
):
    assert_it_moves_from_the_host(by_start_script)


def pretrain_with_torchs_names_of_types(lines: list[list[str]]) -> list[Steps]:
    on_ascend.install()
    torch.Tensor.type = torch.Tensor.type.__wrapped__  # pyright: ignore
    return pretrain_each(lines, [Delays()])


@pytest.mark.slow
def test_without_the_names_of_types_that_the_start_script_brings_no_step_ends(
    npu_worlds: DeviceWorlds,
):
    with pytest.raises(DeviceFailure, match="AssertionError"):
        npu_worlds.run(pretrain_with_torchs_names_of_types, 2, [gpt_args("--train-iters", "1")])
