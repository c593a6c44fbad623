# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how many bytes one rank needs: at rest, in flight, for activations and logits, at its peak
while it starts and while it trains. Must not import Megatron or torch.distributed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_asynchzp.planner import activations
from megatron_asynchzp.planner.activations import Setting
from megatron_asynchzp.planner.model import GroupKey, Layer, chunk_layers

_FP32 = 4


@dataclass(frozen=True)
class Sizes:
    """Ranks that share one copy of the parameters (P), the gradients (G), the optimizer (O)."""

    param: int
    grad: int
    optim: int


class Sized(Protocol):
    """What memory in flight depends on: parameters of a unit on one rank, and their group."""

    @property
    def numel(self) -> int: ...
    @property
    def group(self) -> GroupKey: ...


# ---- at rest


def state_nbytes(
    numel: float, itemsize: int, sizes: Sizes, moments: float = 2 * _FP32
) -> dict[str, float]:
    """AsyncHZP section 3, without padding: b N/P, 4 N/G, 4 N/O and m N/O.

    b: itemsize of the model's parameters (fp32 ones are their own main parameters); moments: bytes
    of the optimizer's states per element, m: 8 for Adam in fp32, 4 with both moments in bf16.
    """
    return {
        "model_param": numel * itemsize / sizes.param,
        "main_grad": _FP32 * numel / sizes.grad,
        "main_param": 0.0 if itemsize == _FP32 else _FP32 * numel / sizes.optim,
        "optimizer_moments": moments * numel / sizes.optim,
    }


def states(
    units: Sequence[Sized], itemsize: int, sizes: Mapping[GroupKey, Sizes], moments: float = 8.0
) -> dict[str, float]:
    """The sum over `units`."""
    total: dict[str, float] = defaultdict(float)
    for unit in units:
        for state, nbytes in state_nbytes(unit.numel, itemsize, sizes[unit.group], moments).items():
            total[state] += nbytes
    return dict(total)


# ---- in flight


def in_flight(
    units: Sequence[Sized],
    itemsize: int,
    sizes: Mapping[GroupKey, Sizes],
    prefetch_depth: int = 1,
    grad_slots: int = 2,
) -> dict[str, float]:
    """Of units of one rank: rings of whole parameters and of whole fp32 gradients, one ring for
    each size of unit, without padding. Replace this function with the engine's memory in flight."""
    equal: dict[tuple[int, GroupKey], int] = defaultdict(int)
    for unit in units:
        if unit.numel:
            equal[unit.numel, unit.group] += 1
    params = grads = 0.0
    for (numel, group), number in equal.items():
        if sizes[group].param > 1:
            params += min(number, prefetch_depth + 1) * numel * itemsize
        if sizes[group].grad > 1:
            # A slot, and beside it what the reduction over its first axis leaves.
            whole = numel * _FP32 * (1 + 1 / sizes[group].grad)
            grads += min(number, grad_slots) * whole
    return {"param_ring": params, "grad_ring": grads}


def largest_unit(units: Sequence[Sized], itemsize: int) -> float:
    """Bytes of the largest unit, whole: what a model in construction, and autograd in backward,
    hold of one unit."""
    return max((unit.numel for unit in units), default=0) * itemsize


# ---- activations


@dataclass(frozen=True)
class Activations:
    """kept: from forward to backward, of all micro-batches in flight; logits: beside it while the
    loss is computed; working: beside it while one layer is computed again and differentiated;
    buffer: memory that an implementation keeps for good."""

    kept: float
    logits: float
    working: float
    buffer: float = 0.0

    @property
    def peak(self) -> float:
        return self.kept + max(self.logits, self.working) + self.buffer


def micro_batches_in_flight(of: Setting, stage: int) -> float:
    """How many micro-batches a rank of `stage` holds activations of at most, in whole stages: with
    virtual stages a part of one for each model chunk (Megatron's 1F1B schedules)."""
    pp, virtual, number = of.parallel.pp, of.parallel.virtual, of.batch.num_micro_batches
    if virtual == 1:
        return min(pp - stage, number)
    warm_up = 2 * (pp - stage - 1) + (virtual - 1) * pp
    return min(warm_up + 1, virtual * number) / virtual


def _kept_of_layers(layers: Sequence[Layer], of: Setting) -> float:
    """Of one micro-batch in one model chunk."""
    recompute, per_layer = of.recompute, [activations.layer_nbytes(one, of) for one in layers]
    if recompute.granularity != "full":
        return sum(per_layer)
    if recompute.method == "uniform":
        return of.hidden_nbytes * -(-len(layers) // recompute.num_layers)
    again = min(recompute.num_layers, len(layers))
    return again * of.hidden_nbytes + sum(per_layer[again:])


def _working(layers: Sequence[Layer], of: Setting) -> float:
    """Of the layers that are computed again together, and the gradients of activations in one."""
    gradients = max((activations.gradient_nbytes(one, of) for one in layers), default=0.0)
    whole = Setting(of.model, of.parallel, of.batch, of.kernels)
    full = [activations.layer_nbytes(one, whole) for one in layers]
    match of.recompute.granularity:
        case "full":
            together = of.recompute.num_layers if of.recompute.method == "uniform" else 1
            again = max((sum(full[i : i + together]) for i in range(len(full))), default=0.0)
        case "selective":
            kept = (activations.layer_nbytes(one, of) for one in layers)
            again = max((a - b for a, b in zip(full, kept, strict=True)), default=0.0)
        case _:
            again = 0.0
    return again + gradients


def stage_activations(of: Setting, stage: int) -> Activations:
    """Of a rank of pipeline stage `stage`."""
    chunks = chunk_layers(of.model, of.parallel, stage)
    layers = [layer for chunk in chunks for layer in chunk]
    is_last = stage == of.parallel.pp - 1
    mtp = of.model.mtp if is_last else ()
    one = sum(_kept_of_layers(chunk, of) for chunk in chunks)
    if of.parallel.pp > 1:  # what a stage received, for as long as its gradient is not sent
        one += of.hidden_nbytes * of.parallel.virtual * (stage > 0)
    kept = one * micro_batches_in_flight(of, stage)
    logits = buffer = 0.0
    if is_last:
        # The last norm and the predictions of further tokens belong to one micro-batch at a time.
        kept += activations.final_norm_nbytes(of) * (1 + len(mtp))
        kept += sum(activations.layer_nbytes(layer, of) + 4 * of.hidden_nbytes for layer in mtp)
        logits = activations.loss_nbytes(of) * (1 + len(mtp))
    if of.kernels.core == "scores":
        buffer = max((activations.buffer_nbytes(layer, of) for layer in layers), default=0.0)
    return Activations(kept, logits, _working([*layers, *mtp], of), buffer)


# ---- the whole


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. at_rest: by state; in_flight: by kind; whole_unit: the largest unit whole,
    which construction holds once, and backward as autograd's own gradients."""

    at_rest: Mapping[str, float]
    in_flight: Mapping[str, float]
    whole_unit: float
    activations: Activations
    moments_key: str = "optimizer_moments"

    @property
    def states(self) -> float:
        return sum(self.at_rest.values())

    @property
    def flying(self) -> float:
        return sum(self.in_flight.values())

    @property
    def start(self) -> float:
        """The peak until the first step: moments come with the first update."""
        return self.states - self.at_rest[self.moments_key] + self.flying + self.whole_unit

    @property
    def total(self) -> float:
        """The highest of all."""
        return max(self.start, self.states + self.flying + self.whole_unit + self.activations.peak)

    def left_of(self, device_nbytes: float) -> float:
        """What remains of a device for its libraries and fragmentation; negative: too little."""
        return device_nbytes - self.total
