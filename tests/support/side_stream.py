# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A layer that computes a part of itself on a side stream, as Megatron's shared experts do beside
the routed ones, and what autograd does with streams on a device, played on a recording device.

[Note: streams of autograd] A node of the graph runs in backward on the stream on which its forward
ran, and waits for the stream that produced its gradient. The node that accumulates the gradient of
a parameter runs on the stream that was current when that node was made: on first use in a forward,
unless somebody has held on to it since. Its hooks run there too. When backward ends, the stream
that called it waits for all streams on which gradients were accumulated, then its callbacks run.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.support.recording_device import DEFAULT_STREAM, Clock, RecordingDevice
from tests.support.toy_models import ToyLM

SIDE, WRAPPING = "side stream", "stream on which the model is wrapped"
_MADE_ON = "stream on which this node was made"


def _accumulator(param: torch.Tensor) -> Any:
    """The node that accumulates the gradient of `param`; made now, unless somebody holds it."""
    with torch.enable_grad():
        return param.view_as(param).grad_fn.next_functions[0][0]


class AutogradStreams:
    """produced: the end of the node that ran last on the side stream."""

    def __init__(self, device: RecordingDevice):
        self.device = device
        self.produced: Clock = {}

    def note_accumulators(self, params: Iterable[torch.Tensor], stream: str) -> list[Any]:
        """Those that are not known yet were made on `stream`. They last as long as the result,
        where nobody else holds them."""
        nodes = [_accumulator(param) for param in params]
        for node in nodes:
            node.metadata.setdefault(_MADE_ON, stream)
        return nodes

    def watch(self, model: nn.Module) -> None:
        """Let the nodes of all parameters wait for their gradients, also where nobody else has a
        hook, and notice which of them are held from the start of a forward on; within `applied`,
        before hooks that are to run earlier are put before this one."""
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _param: None)

        def begin_forward(model: nn.Module, _args: object) -> None:
            self.note_accumulators(model.parameters(), DEFAULT_STREAM)

        model.register_forward_pre_hook(begin_forward)

    @contextmanager
    def wrapping(self, model: nn.Module) -> Iterator[None]:
        """As Megatron's get_model: what is made within is made on a stream of its own, and so are
        the nodes that are held from then on."""
        self.device.order(self.device.now(), WRAPPING)
        with self.device.on_stream(WRAPPING):
            yield
            self.note_accumulators(model.parameters(), WRAPPING)
            end = self.device.now()
        self.device.order(end, DEFAULT_STREAM)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hooks that are registered within run on the stream of their node, after the gradient."""
        register = torch.Tensor.register_post_accumulate_grad_hook

        def register_on_stream(param: torch.Tensor, hook):
            def on_stream(param: torch.Tensor) -> None:
                stream = self.stream_of_hook(param)
                self.device.order(self.produced, stream)
                if param.grad is not None:
                    self.device.record_stream(param.grad, stream)
                with self.device.on_stream(stream):
                    hook(param)

            return register(param, on_stream)

        with mock.patch.object(
            torch.Tensor, "register_post_accumulate_grad_hook", register_on_stream
        ):
            yield

    def stream_of_hook(self, param: torch.Tensor) -> str:
        """On which the hooks of the accumulated gradient of `param` run."""
        return _accumulator(param).metadata.get(_MADE_ON, DEFAULT_STREAM)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward on a thread of its own, which ends with the join of the streams."""
        loss.register_hook(self._join_at_the_end)
        self.device.run_on_thread(loss.backward)

    def _join_at_the_end(self, _grad: torch.Tensor) -> None:
        def join() -> None:
            with self.device.on_stream(SIDE):
                end = self.device.now()
            self.device.order(end, DEFAULT_STREAM)

        torch.autograd.Variable._execution_engine.queue_callback(join)


class _ToSide(torch.autograd.Function):
    """Identity between the main stream and the side stream."""

    @staticmethod
    def forward(ctx, streams: AutogradStreams, x: torch.Tensor) -> torch.Tensor:
        ctx.streams = streams
        streams.device.order(streams.device.now(), SIDE)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        ctx.streams.device.order(ctx.streams.produced, DEFAULT_STREAM)
        return None, grad


class _SideLinear(torch.autograd.Function):
    """A linear layer on the side stream; is_last: its gradient comes from the main stream."""

    @staticmethod
    def forward(ctx, streams: AutogradStreams, is_last: bool, x, weight):
        ctx.streams, ctx.is_last = streams, is_last
        with streams.device.on_stream(SIDE):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        streams, device = ctx.streams, ctx.streams.device
        if ctx.is_last:
            device.order(device.now(), SIDE)
        x, weight = ctx.saved_tensors
        with device.on_stream(SIDE):
            dgrad = grad @ weight
            wgrad = grad.flatten(0, -2).t() @ x.flatten(0, -2)
            streams.produced = device.now()
        return None, None, dgrad, wgrad


class SharedExpertBlock(nn.Module):
    """Routed experts on the main stream beside a shared one on the side stream."""

    def __init__(self, width: int, streams: AutogradStreams):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.routed = nn.Linear(width, width)
        self.shared_up = nn.Parameter(torch.randn(2 * width, width) * 0.1)
        self.shared_down = nn.Parameter(torch.randn(width, 2 * width) * 0.1)
        self._streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        streams, device = self._streams, self._streams.device
        normed = self.norm(x)
        nodes = streams.note_accumulators((self.shared_up, self.shared_down), SIDE)
        hidden = _SideLinear.apply(streams, False, _ToSide.apply(streams, normed), self.shared_up)
        shared = _SideLinear.apply(streams, True, hidden, self.shared_down)
        del nodes  # the graph holds them now
        routed = self.routed(normed)
        with device.on_stream(SIDE):
            joined = device.now()
        device.order(joined, DEFAULT_STREAM)
        return x + routed + shared


def use_side_stream(model: ToyLM, streams: AutogradStreams) -> ToyLM:
    """Blocks with a shared expert in place of those of `model`."""
    width = model.embedding.embedding_dim
    model.blocks = nn.ModuleList(SharedExpertBlock(width, streams) for _ in model.blocks)
    return model
