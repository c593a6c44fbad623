# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's own CUDA path on the emulated device, without the CPU platform: pretrain() with stock
DDP and with the engine, local layers, NCCL."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from scripts.testbed import megatron_runs
from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from scripts.testbed.ranks import run_ranks
from tests.device.programs import is_emulated

Steps = list[tuple[float | None, float | None]]


def pretrain_each(command_lines: list[list[str]], delays: list[Delays]) -> list[Steps]:
    """Loss and gradient norm of every step, of each command line under each delay."""
    if not is_emulated():
        return [_steps(argv) for argv in command_lines]
    from scripts.testbed.device import inside

    results = []
    for law in delays:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        results += [_steps_on_device(argv) for argv in command_lines]
    return results


def _steps(argv: list[str]) -> Steps:
    record = run_pretrain(argv)
    return [(step.loss, step.grad_norm) for step in record.steps]


def _steps_on_device(argv: list[str]) -> Steps:
    """With the implementations that the CPU platform chooses, and nothing else of it."""
    from megatron_asynchzp import cpu_platform
    from megatron_asynchzp.cpu_platform.arguments import CPU_VALUES

    on_device = {"distributed_backend": "nccl", "use_cpu_initialization": False}

    def choose(args: Any) -> list[str]:
        for name, value in (CPU_VALUES | on_device).items():
            if hasattr(args, name):
                setattr(args, name, value)
        return []

    forward_step = megatron_runs._forward_step

    def forward_on_device(batches: Iterator, model: torch.nn.Module) -> tuple:
        batch = {name: value.cuda() for name, value in next(batches).items()}
        return forward_step(iter([batch]), model)

    with (
        mock.patch.object(cpu_platform, "install", lambda: None),
        mock.patch.object(cpu_platform, "apply_cpu_defaults", choose),
        mock.patch.object(megatron_runs, "_forward_step", forward_on_device),
    ):
        return _steps(argv)


@pytest.mark.slow
def test_megatron_on_cuda_prints_the_digits_of_gloo_stock_and_sharded_under_delays(
    worlds: DeviceWorlds,
):
    lines = [gpt_args("--train-iters", "4"), gpt_args("--train-iters", "4", *size_flags((1, 2, 2)))]
    expected = run_ranks(pretrain_each, 2, lines, [])[0]
    delays = [Delays(), Delays("uniform", 1), Delays("slow-stream", 2)]
    seen = worlds.run(pretrain_each, 2, lines, delays, timeout_s=400)[0]
    for index, law in enumerate(delays):
        assert seen[2 * index : 2 * index + 2] == expected, str(law)
