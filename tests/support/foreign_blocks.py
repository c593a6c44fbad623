# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A model whose layers communicate by themselves, as tensor-parallel ones do: one all-reduce at the
end of a layer's forward, one at the end of its backward; a shared expert has its own on a side
stream.
"""

from typing import Any

import torch
from torch import nn

from tests.support.device_queues import CommandLog
from tests.support.recording_device import Group
from tests.support.side_stream import SIDE, AutogradStreams, SharedExpertBlock
from tests.support.toy_models import ToyLM


class _AllReduce(torch.autograd.Function):
    """Identity for the values; communicates in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: CommandLog, group: Group, in_forward: bool):
        ctx.device, ctx.group, ctx.in_forward = device, group, in_forward
        if in_forward:
            device.collective("all-reduce forward", group, x).wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        if not ctx.in_forward:
            ctx.device.collective("all-reduce backward", ctx.group, grad).wait()
        return grad, None, None, None


class ForeignBlock(SharedExpertBlock):
    """A block with a shared expert between two all-reduces, and one more on the side stream."""

    def __init__(self, width: int, streams: AutogradStreams, group: Group):
        super().__init__(width, streams)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = self._streams.device
        out = super().forward(_AllReduce.apply(x, device, self._group, False))
        with device.on_stream(SIDE):
            device.collective("all-reduce of the shared expert", self._group, out).wait()
        return _AllReduce.apply(out, device, self._group, True)


def use_foreign_blocks(model: ToyLM, streams: AutogradStreams, group: Group) -> ToyLM:
    """Blocks that communicate over `group` in place of those of `model`."""
    width = model.embedding.embedding_dim
    model.blocks = nn.ModuleList(ForeignBlock(width, streams, group) for _ in model.blocks)
    return model
