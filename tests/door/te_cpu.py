# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own Python on the CPU platform, for frameworks that import it."""

import os
from typing import Any
from unittest import mock

import torch

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
