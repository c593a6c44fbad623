# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own Python on the CPU platform, for frameworks that import it."""

import os
import sys
from typing import Any
from unittest import mock

import torch

from scripts.testbed.te.environment import install

# Bridge's pretrain() imports what they hold, and uses nothing of it here.
RESILIENCY = "nvidia_resiliency_ext"


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


def pretend(package: str, *modules: str) -> None:
    """Let modules of a package that is not there be imported."""
    for name in (package, *(f"{package}.{module}" for module in modules)):
        sys.modules[name] = mock.MagicMock(__spec__=None, __path__=[])
