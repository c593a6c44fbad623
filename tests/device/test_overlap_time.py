# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One step of Megatron with experts, by the clock of the emulated device: ours hides what stock
hides, and more. Attention, experts, collectives and messages take stated times, all else and the
host take none."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from megatron_asynchzp.comm.timeline import Span, union_s
from scripts.bench.bench_device import FREED_LATE
from scripts.testbed.contenders.layer_delay import Delay
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import (
    DISTRIBUTED_OPTIMIZER,
    MIXTURE_OF_EXPERTS,
    shape_flags,
    size_flags,
)
from scripts.testbed.megatron_runs import gpt_args, listening, on_device, run_pretrain
from scripts.testbed.profile import NetworkProfile

STEPS = 4  # the third is measured: ours knows from the first what follows what
COMPUTES, ALL_TO_ALL = "compute", "send/recv"  # experts get unlike numbers of tokens
# Of the forward of a layer. A backward takes twice that, half of it for weight gradients.
ATTENTION_S, EXPERTS_S = 6e-3, 8e-3
# One node, whose ranks share a link of 12.5 MB/s: the model is small.
NETWORK = NetworkProfile("device", intra_gbit=0.1, ranks_per_node=2)
OVERLAPPED, LATE = "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"
# fmt: off
BASE = gpt_args(
    "--bf16", *shape_flags(2, 64, 256), *MIXTURE_OF_EXPERTS, "--moe-grouped-gemm",
    "--ffn-hidden-size", "128", "--moe-ffn-hidden-size", "64", "--attention-backend", "unfused",
    "--expert-model-parallel-size", "2", "--global-batch-size", "8", "--train-iters", str(STEPS),
    # Stock's host waits for its search for NaN in each bucket before it reduces it.
    "--no-bias-swiglu-fusion", "--clip-grad", "1000", "--no-check-for-nan-in-loss-and-grad",
)
# fmt: on
OURS = [*BASE, *size_flags((2, 2, 2))]
# A bucket for about each attention and each rank's experts, as a large model has them.
STOCK = [*BASE, *DISTRIBUTED_OPTIMIZER, "--ddp-bucket-size", "16000", OVERLAPPED]
LINES = [STOCK, OURS, [*OURS, OVERLAPPED], [*OURS, OVERLAPPED, LATE]]


class Step(NamedTuple):
    """Seconds: of the step, of all-to-alls and of other collectives, what overlaps counted once;
    and those without computation: beside an all-to-all, beside others alone."""

    step: float
    all_to_all: float
    others: float
    exposed_all_to_all: float
    exposed_others: float
    losses: list[float | None]

    @property
    def hidden(self) -> float:
        """The part of gathers and reductions beside which something is computed."""
        return 1 - self.exposed_others / self.others


def measure_each(lines: Sequence[Sequence[str]]) -> list[Step]:
    return [_measured(line) for line in lines]


def _measured(line: Sequence[str]) -> Step:
    from scripts.testbed.device import inside

    marks: list[torch.cuda.Event] = []

    def mark() -> None:
        if not marks:
            inside.state_time(NETWORK)
            marks.append(_now())
        marks.append(_now())

    with on_device(uses_te=True), _stated(LATE in line), listening(mark, lambda _: None):
        losses = run_pretrain([*line]).losses
    start, *begins = marks
    begin_s, end_s = (1e-3 * start.elapsed_time(one) for one in begins[-2:])
    seen = [
        Span(one.what, "", max(one.begin_s, begin_s), min(one.end_s, end_s))
        for one in inside.spans()
    ]
    moved = [one for one in seen if one.lane == ALL_TO_ALL]
    others = [one for one in seen if one.lane not in (COMPUTES, ALL_TO_ALL)]
    with_moved = [one for one in seen if one.lane in (COMPUTES, ALL_TO_ALL)]
    busy_s = union_s([one for one in seen if one.lane == COMPUTES])
    exposed = union_s(with_moved) - busy_s, union_s(seen) - union_s(with_moved)
    return Step(end_s - begin_s, union_s(moved), union_s(others), *exposed, losses)


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextlib.contextmanager
def _stated(is_late: bool) -> Iterator[None]:
    """Inside, attention and experts of Megatron's layers take their times."""
    from megatron.core.models.common import utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from scripts.testbed.device import inside

    def taking(call: Callable, seconds: float) -> Callable:
        def forward(self: Any, *args: Any, **kwargs: Any) -> tuple:
            made, *rest = call(self, *args, **kwargs)
            return Delay.apply(made, seconds, seconds if is_late else None), *rest

        return forward

    late_attention: Any = utils._BackwardDWWrapper.backward_dw
    late_experts: Any = MoELayer.backward_dw

    def attention_grads(self: Any) -> None:
        inside.compute(ATTENTION_S)
        late_attention(self)

    def experts_grads(self: Any, routed_experts: bool = True, **others: Any) -> None:
        if routed_experts:
            inside.compute(EXPERTS_S)
        late_experts(self, routed_experts, **others)

    layer: Any = TransformerLayer
    attention = taking(layer._forward_attention, ATTENTION_S)
    experts = taking(MoELayer.routed_experts_compute, EXPERTS_S)
    with (
        mock.patch.object(layer, "_forward_attention", attention),
        mock.patch.object(MoELayer, "routed_experts_compute", experts),
        mock.patch.object(MoELayer, "backward_dw", experts_grads),
        mock.patch.object(utils._BackwardDWWrapper, "backward_dw", attention_grads),
    ):
        yield


@pytest.mark.slow
def test_as_much_of_the_all_to_alls_is_hidden_as_for_stock_and_more_of_the_gathers(
    te_worlds: DeviceWorlds,
):
    for seen in te_worlds.run(measure_each, 2, LINES, env=FREED_LATE, timeout_s=590):
        stock, plain, overlapped, late = seen
        assert overlapped.losses == stock.losses
        assert plain.exposed_all_to_all == pytest.approx(plain.all_to_all, rel=0.01)
        # Where a peer comes later because of its first gather, an all-to-all waits.
        assert overlapped.exposed_all_to_all <= 1.3 * stock.exposed_all_to_all
        assert late.exposed_all_to_all < overlapped.exposed_all_to_all < 0.4 * plain.all_to_all
        assert overlapped.hidden > 0.7 > 2 * stock.hidden
        assert late.step < overlapped.step < plain.step
