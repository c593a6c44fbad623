# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how `scripts.testbed.megatron_runs` trains on emulated devices instead of gloo: on
Megatron's own CUDA path, without the CPU platform."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from scripts.testbed import megatron_runs


@contextmanager
def on_device() -> Iterator[None]:
    """Inside, runs are on this rank's device, with the implementations that the CPU platform
    chooses, and nothing else of it."""
    from megatron_asynchzp import cpu_platform
    from megatron_asynchzp.cpu_platform.arguments import CPU_VALUES

    values = CPU_VALUES | {"distributed_backend": "nccl", "use_cpu_initialization": False}

    def choose(args: Any) -> list[str]:
        for name, value in values.items():
            if hasattr(args, name):
                setattr(args, name, value)
        return []

    forward_step = megatron_runs._forward_step

    def forward_on_device(batches: Iterator, model: torch.nn.Module) -> tuple:
        batch = {name: value.cuda() for name, value in next(batches).items()}
        return forward_step(iter([batch]), model)

    with ExitStack() as stack:
        for owner, name, value in (
            (cpu_platform, "install", lambda: None),
            (cpu_platform, "apply_cpu_defaults", choose),
            (megatron_runs, "_forward_step", forward_on_device),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
