# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One step of Megatron with experts, by the clock of the emulated device: layer by layer, and with
one micro-batch's backward beside the next one's forward, with and without late weight gradients.

Attention, experts, collectives and messages take stated times, all else and the host take none.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch

from megatron_asynchzp.comm.timeline import Span, union_s
from scripts.testbed.contenders.layer_delay import Delay
from scripts.testbed.megatron_flags import (
    DISTRIBUTED_OPTIMIZER,
    MIXTURE_OF_EXPERTS,
    flags_of,
    shape_flags,
)
from scripts.testbed.megatron_runs import gpt_args, listening, on_device, run_pretrain
from scripts.testbed.profile import NetworkProfile

STEPS = 4  # the third is measured: ours knows from the first what follows what
COMPUTES, ALL_TO_ALL = "compute", "send/recv"  # experts get unlike numbers of tokens


@dataclass(frozen=True)
class Times:
    """Stated seconds of the forward of a layer's attention and of its experts. A backward takes
    twice that, half of it for weight gradients, which may come late."""

    attention_s: float
    experts_s: float


TIMES = Times(6e-3, 8e-3)
OVERLAPPED = ["--overlap-moe-expert-parallel-comm"]
SCHEDULES = {
    "layer by layer": [],
    "overlapped": OVERLAPPED,
    "overlapped, late": [*OVERLAPPED, "--delay-wgrad-compute"],
}
# A bucket for about each attention and each rank's experts, as a large model has them.
STOCK = [*DISTRIBUTED_OPTIMIZER, "--ddp-bucket-size", "16000"]


def model_flags(ranks: int, experts_on: int, layers: int, micro_batches: int) -> list[str]:
    """experts_on: ranks that a layer's four experts are on; micro_batches: of a rank."""
    # fmt: off
    return gpt_args(
        "--bf16", *shape_flags(layers, 64, 256), *MIXTURE_OF_EXPERTS, "--moe-grouped-gemm",
        *flags_of({
            "ffn-hidden-size": 128, "moe-ffn-hidden-size": 64, "attention-backend": "unfused",
            "expert-model-parallel-size": experts_on, "global-batch-size": ranks * micro_batches,
        }),
        # Stock's host waits for its search for NaN in each bucket before it reduces it.
        "--no-bias-swiglu-fusion", "--clip-grad", "1000", "--no-check-for-nan-in-loss-and-grad",
    )
    # fmt: on


class Step(NamedTuple):
    """Milliseconds: of the step, computation, all-to-alls, other collectives, what overlaps counted
    once; and those without computation: beside an all-to-all, beside others alone, beside none."""

    step: float
    computed: float
    all_to_all: float
    others: float
    exposed_all_to_all: float
    exposed_others: float
    idle: float
    losses: list[float]


def measure_each(
    lines: Sequence[Sequence[str]], times: Times, network: NetworkProfile
) -> list[Step]:
    """lines: flags of Megatron for a model of layers with experts, of each run."""
    return [_measured(line, times, network) for line in lines]


def _measured(line: Sequence[str], times: Times, network: NetworkProfile) -> Step:
    from scripts.testbed.device import inside

    marks: list[torch.cuda.Event] = []

    def mark() -> None:
        if not marks:
            inside.state_time(network)
            marks.append(_now())
        marks.append(_now())

    with on_device(uses_te=True), _stated(times, "--delay-wgrad-compute" in line):
        with listening(mark, lambda _: None):
            run = run_pretrain([*line, "--train-iters", str(STEPS)])
    start, *begins = marks
    begin_s, end_s = (1e-3 * start.elapsed_time(one) for one in begins[-2:])
    seen = [
        Span(one.what, "", max(one.begin_s, begin_s), min(one.end_s, end_s))
        for one in inside.spans()
    ]
    computed = [one for one in seen if one.lane == COMPUTES]
    moved = [one for one in seen if one.lane == ALL_TO_ALL]
    others = [one for one in seen if one.lane not in (COMPUTES, ALL_TO_ALL)]
    busy_s, with_moved_s, with_all_s = map(union_s, (computed, [*computed, *moved], seen))
    exposed = with_moved_s - busy_s, with_all_s - with_moved_s
    whole_s = end_s - begin_s
    parts = whole_s, busy_s, union_s(moved), union_s(others), *exposed, whole_s - with_all_s
    ms = [round(1e3 * seconds, 3) for seconds in parts]
    return Step(*ms, losses=[float(loss or 0) for loss in run.losses])


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextlib.contextmanager
def _stated(times: Times, is_late: bool) -> Iterator[None]:
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
        inside.compute(times.attention_s)
        late_attention(self)

    def experts_grads(self: Any, routed_experts: bool = True, **others: Any) -> None:
        if routed_experts:
            inside.compute(times.experts_s)
        late_experts(self, routed_experts, **others)

    layer: Any = TransformerLayer
    attention = taking(layer._forward_attention, times.attention_s)
    experts = taking(MoELayer.routed_experts_compute, times.experts_s)
    with (
        mock.patch.object(layer, "_forward_attention", attention),
        mock.patch.object(MoELayer, "routed_experts_compute", experts),
        mock.patch.object(MoELayer, "backward_dw", experts_grads),
        mock.patch.object(utils._BackwardDWWrapper, "backward_dw", attention_grads),
    ):
        yield
