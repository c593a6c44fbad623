# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A small language model with the parts that an engine must serve.

It has tied weights, recomputation, an odd-sized bias, and gradients on a second stream.
"""

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scripts.gpu_check.loopback_world import sleep_on_stream


@dataclass(frozen=True)
class ToyShape:
    """What the model is, and its batches.

    sequence: tokens of one; batch: sequences of a micro-batch; is_tied: the output layer uses the
    embedding's weight; recomputes: blocks run again in backward; has_side_stream: half of each
    block runs on a second stream, whose backward is late by up to `late_s`.
    """

    width: int = 16
    depth: int = 3
    vocab: int = 40
    sequence: int = 8
    batch: int = 4
    is_tied: bool = False
    recomputes: bool = False
    has_side_stream: bool = False
    late_s: float = 0.0
    dtype: torch.dtype = torch.bfloat16


class Block(nn.Module):
    """12 parameters: norms, four linears of which some have a bias, and a residual."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)
        self.gate, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = self.side(self.second_norm(x))
        # In the order of the block below: autograd adds up the gradients of x in that order.
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y + beside

    def side(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.gate(x)))


class SideStreamBlock(Block):
    """A block whose second half, forward and backward, runs on a stream of its own."""

    def __init__(self, width: int, late_s: float):
        super().__init__(width)
        self._late_s, self._stream = late_s, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        module = torch.get_device_module(x.device)
        main = module.current_stream()
        self._stream = self._stream or module.Stream()
        inputs = self.second_norm(x)
        self._stream.wait_stream(main)
        with module.stream(self._stream):
            inputs.record_stream(self._stream)
            beside = _LateBackward.apply(self.side(inputs), self._late_s)
        y = self.down(F.gelu(self.up(self.norm(x))))
        main.wait_stream(self._stream)
        beside.record_stream(main)
        return x + y + beside


class _LateBackward(torch.autograd.Function):
    """Identity whose backward lets its stream rest for a random time."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, late_s: float) -> torch.Tensor:
        ctx.late_s = late_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        sleep_on_stream(random.uniform(0.0, ctx.late_s), grad.device)
        return grad, None


class ToyModel(nn.Module):
    """Embedding, blocks, final norm, output layer."""

    def __init__(self, shape: ToyShape):
        super().__init__()
        self._recomputes = shape.recomputes
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(
            SideStreamBlock(shape.width, shape.late_s)
            if shape.has_side_stream
            else Block(shape.width)
            for _ in range(shape.depth)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.is_tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self._recomputes and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return self.output(self.norm(x))


def new_model(shape: ToyShape, device: torch.device) -> ToyModel:
    """The same model at every call."""
    torch.manual_seed(5)
    return ToyModel(shape).to(device, shape.dtype)


def batch_of(shape: ToyShape, step: int, micro_batch: int, device: torch.device) -> torch.Tensor:
    """Tokens [batch, sequence + 1]."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    tokens = torch.randint(0, shape.vocab, (shape.batch, shape.sequence + 1), generator=generator)
    return tokens.to(device)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """0-dim, fp32."""
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
