# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Captures queries and keys in a step of a training run, for `asynchzp inspect`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.attention.capture import capture_when
from megatron_asynchzp.mcore.flags.pasa import CaptureRequest


def capture_attention(
    request: CaptureRequest, megatron: Any, model_chunks: Sequence[nn.Module]
) -> None:
    """Capture on rank 0, in the step's first micro-batch; megatron has its settings by name."""
    if megatron.rank != 0:
        return

    def is_due() -> bool:
        # Megatron counts the steps that are done. Before the first one it has counted nothing.
        return getattr(megatron, "curr_iteration", None) == request.step - 1

    model = model_chunks[0] if len(model_chunks) == 1 else nn.ModuleList(model_chunks)
    if not capture_when(model, is_due, partial(_write, request)):
        print("megatron_asynchzp: --asynchzp-capture-attention: no attention found", flush=True)


def _write(request: CaptureRequest, layers: dict[str, dict[str, torch.Tensor]]) -> None:
    try:
        torch.save(layers, request.path)
    except (OSError, RuntimeError) as error:
        text = f"--asynchzp-capture-attention: {request.path} cannot be written: {error}"
    else:
        count = f"{len(layers)} layers of step {request.step}"
        text = f"queries and keys of {count} are in {request.path} (asynchzp inspect)"
    print(f"megatron_asynchzp: {text}", flush=True)
