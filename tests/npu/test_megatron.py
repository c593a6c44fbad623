# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron on emulated NPUs by what the start script brings: pretrain() with stock DDP and with the
engine, local layers, HCCL."""

import pytest
import torch

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from scripts.testbed.megatron_flags import BF16, size_flags
from scripts.testbed.megatron_runs import Steps, gpt_args
from scripts.testbed.ranks import run_ranks
from scripts.train import on_ascend
from tests.device.test_megatron import LAWS, LAYOUTS, Layout, are_close, pretrain_each

DATA = [(1, 2, 2), (2, 2, 2), (1, 1, 2)]


MUON = ("--optimizer", "muon", "--muon-fp32-matmul-prec", "high")
NPU_LAYOUTS = LAYOUTS | {
    "muon": Layout(2, MUON, (1, 2, 2)),
    "bf16": Layout(2, (*BF16, "--accumulate-allreduce-grads-in-fp32"), (1, 2, 2)),
}


def pretrain_by_start_script(lines: list[list[str]], delays: list[Delays]) -> list[Steps]:
    on_ascend.install()
    return pretrain_each(lines, delays)


@pytest.mark.slow
@pytest.mark.parametrize("name", NPU_LAYOUTS)
def test_megatron_on_npus_trains_as_on_gloo_and_no_delay_changes_a_bit(
    npu_worlds: DeviceWorlds, name: str
):
    layout = NPU_LAYOUTS[name]
    base = gpt_args("--train-iters", "3", *layout.flags)
    choices = DATA if name == "data" else [layout.sizes]
    lines = [base, *([*base, *size_flags(sizes)] for sizes in choices)]
    on_gloo = run_ranks(pretrain_each, layout.world_size, lines, [], timeout_s=300)[0]
    laws = [Delays(), *LAWS]
    seen = npu_worlds.run(
        pretrain_by_start_script, layout.world_size, lines, laws, timeout_s=550, env=layout.env
    )[0]
    first = seen[: len(lines)]
    for found, expected in zip(first, on_gloo, strict=True):
        assert are_close(found, expected) and are_close(found, first[0])
    for index in range(1, len(laws)):
        assert seen[index * len(lines) : (index + 1) * len(lines)] == first, str(laws[index])


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
