# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the time that a Megatron transformer layer takes on the emulated accelerator."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class Delay(torch.autograd.Function):
    """Forward `seconds`, backward `backward_s` or twice that, each with small real arithmetic.

    The output is no view of the input: pipeline stages free what they have sent, which Megatron
    refuses to do to a view.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, seconds: float, backward_s: float | None = None
    ) -> torch.Tensor:
        ctx.backward_s = 2 * seconds if backward_s is None else backward_s
        _take(x, seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        _take(grad, ctx.backward_s)
        return grad, None, None


def _take(x: torch.Tensor, seconds: float) -> None:
    """Of this thread; on the emulated device, of the device by its own clock."""
    if not x.is_cuda:
        time.sleep(seconds)
        return
    from scripts.testbed.device import inside

    inside.compute(seconds)


def delayed(hidden: torch.Tensor, forward_ms: float, tensor_parallel: int) -> torch.Tensor:
    """The output of a layer, [sequence, samples, hidden], when an accelerator would have it.

    forward_ms: for one sample on one rank; tensor-parallel ranks divide it evenly. So a step has
    the same sum over all ranks, however it is laid out.
    """
    return Delay.apply(hidden, 1e-3 * forward_ms * hidden.shape[1] / tensor_parallel)


@contextlib.contextmanager
def layers_take(forward_ms: float) -> Iterator[None]:
    """Let every TransformerLayer of Megatron take this long for a sample.

    The delay belongs to the layer's forward: a wrapper of the layer gathers before it and reduces
    after it.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import TransformerLayer

    compute: Any = TransformerLayer.forward  # Megatron does not type its result

    def forward(self: TransformerLayer, *args: Any, **kwargs: Any) -> tuple:
        hidden, *rest = compute(self, *args, **kwargs)
        size = parallel_state.get_tensor_model_parallel_world_size()
        return delayed(hidden, forward_ms, size), *rest

    if not forward_ms:
        yield
        return
    with mock.patch.object(TransformerLayer, "forward", forward):
        yield
