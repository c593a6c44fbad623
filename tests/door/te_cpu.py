# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own Python on the CPU platform, for frameworks that import it; and the bytes
that their functions allocate."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from scripts.testbed.memory import install_memory_count
from scripts.testbed.te.environment import install


def prepare() -> None:
    """Put Transformer Engine over its stand-in, and install the CPU platform."""
    seen = {"is_available": lambda: True, "device_count": lambda: 1}
    with mock.patch.multiple(torch.cuda, get_device_capability=lambda *_: (9, 0), **seen):
        install()
        import megatron.core.extensions.transformer_engine  # noqa: F401
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    replaced: Any = torch
    replaced.Tensor.is_cuda = property(lambda self: True)
    replaced._C._cuda_getCurrentRawStream = lambda *_: 0
    # Its parser meets stand-ins.
    replaced.jit.script = lambda function=None, **_: function or (lambda inner: inner)
    replaced.cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def counted_peak(owner: Any, name: str) -> Iterator[list[int]]:
    """The most bytes of tensors that were alive in each call of a function, within."""
    function, peaks = getattr(owner, name), list[int]()

    def counted(*args: Any, **options: Any) -> Any:
        if (count := install_memory_count()) is None:
            return function(*args, **options)
        before = count.live_nbytes
        count.reset_peak()
        try:
            return function(*args, **options)
        finally:
            peaks.append(count.peak_nbytes - before)
            count.uninstall()

    with mock.patch.object(owner, name, counted):
        yield peaks


def memory_of(model: list[Any]) -> dict[str, int]:
    """Bytes of the parameters of a rank's shards, of its largest unit, and of its whole model."""
    units = [unit for chunk in model for unit in chunk.units]
    return {
        "shards": sum(unit.model_param.nbytes for unit in units),
        "unit": max(unit.layout.padded_numel * unit.dtype.itemsize for unit in units),
        "whole": sum(unit.layout.numel * unit.dtype.itemsize for unit in units),
    }
