# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a rank's bytes: at rest, in flight, of activations, and the peak. Knows no Megatron."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.in_flight import MemoryInFlight, room_nbytes
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner import activations
from megatron_asynchzp.planner.activations import RunShape
from megatron_asynchzp.planner.model import Layer, chunk_layers

_FP32 = 4
_MOMENTS = "optimizer_moments"
_MAIN = "main_param"
_ROOM = "update_room"


# ---- at rest


def state_nbytes(
    numel: float,
    itemsize: int,
    sizes: ShardSizes,
    moments: float = 2 * _FP32,
    main_grad: int = _FP32,
    is_trained: bool = True,
) -> dict[str, float]:
    """AsyncHZP section 3, without padding: b N/P, and for trained units 4 N/G, 4 N/O and m N/O.

    b: itemsize of the model's parameters (fp32 ones are their own main parameters); moments: bytes
    of the optimizer's states per element, m: 8 for Adam in fp32, 4 with both moments in bf16;
    main_grad: of main gradients, 2 in bf16.
    """
    trained = numel if is_trained else 0.0
    return {
        "model_param": numel * itemsize / sizes.param,
        "main_grad": main_grad * trained / sizes.grad,
        _MAIN: 0.0 if itemsize == _FP32 else _FP32 * trained / sizes.optim,
        _MOMENTS: moments * trained / sizes.optim,
    }


def total_nbytes(units: Iterable[tuple[Mapping[str, float], bool]]) -> dict[str, float]:
    """Return the bytes on the device by state.

    units: bytes of each by state, and whether its optimizer states are on the host, whose update
    needs room on the device.
    """
    total, moved = Counter[str](), list[float]()
    for nbytes_of, is_on_host in units:
        away = (_MAIN, _MOMENTS) if is_on_host else ()
        moved.append(sum(nbytes_of[state] for state in away))
        for state, nbytes in nbytes_of.items():
            total[state] += 0 if state in away else nbytes  # pyright: ignore[reportArgumentType]
    if any(moved):
        total[_ROOM] += room_nbytes(moved)  # pyright: ignore[reportArgumentType]
    return dict(total)


@dataclass(frozen=True)
class MomentBytes:
    """Bytes per element of the optimizer's states."""

    all_params: int = 8  # two fp32 moments by default
    matrices: int | None = None  # of those that Muon updates, which have one; None without Muon

    def mean(self, numel: int, matrix_numel: int) -> float:
        """Return a unit's mean bytes per element; `matrix_numel` of its `numel` are in matrices."""
        if self.matrices is None:
            return self.all_params
        others = numel - matrix_numel
        return (self.all_params * others + self.matrices * matrix_numel) / numel


# ---- in addition to the states


@dataclass(frozen=True)
class Copies:
    """Bytes that a process of the CPU platform takes on top, at most."""

    params: int = 0  # that gloo copies while it gathers a unit
    grads: int = 0  # that gloo copies while it reduces a piece
    casts: int = 0  # of a gradient in the model's dtype that is added to one in fp32


# ---- activations


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank."""

    kept: float  # from forward to backward, of all micro-batches in flight
    logits: float  # in addition while the loss is computed
    working: float  # in addition while one layer is recomputed and differentiated
    whole_layer: float = 0.0  # of the largest layer in its own backward pass, which frees it
    kept_layer: float = 0.0  # of a layer until then
    buffer: float = 0.0  # that an implementation keeps for good


def micro_batches_in_flight(setting: RunShape, stage: int) -> float:
    """Return how many micro-batches' activations a rank of `stage` holds at most."""
    # They count whole stages: with virtual stages a micro-batch is a fraction for each model chunk
    # (Megatron's 1F1B schedules).
    pp, virtual = setting.parallel.pp, setting.parallel.virtual
    number = setting.batch.num_micro_batches
    if virtual == 1:
        return min(pp - stage, number)
    warm_up = 2 * (pp - stage - 1) + (virtual - 1) * pp
    return min(warm_up + 1, virtual * number) / virtual


def _kept_of_layers(layers: Sequence[Layer], setting: RunShape) -> float:
    recompute = setting.recompute
    per_layer = [activations.layer_nbytes(layer, setting) for layer in layers]
    if recompute.granularity != "full":
        return sum(per_layer)
    if recompute.method == "uniform":
        return setting.hidden_nbytes * -(-len(layers) // recompute.num_layers)
    again = min(recompute.num_layers, len(layers))
    return again * setting.hidden_nbytes + sum(per_layer[again:])


def _working(layers: Sequence[Layer], setting: RunShape) -> float:
    """Return the bytes of layers recomputed together, and of a layer's activation gradients."""
    # Recomputing a block of first layers begins when backward has freed all the others.
    gradients = max((activations.gradient_nbytes(layer, setting) for layer in layers), default=0.0)
    whole = replace(setting, recompute=activations.Recompute())
    full = [activations.layer_nbytes(layer, whole) for layer in layers]
    match setting.recompute.granularity:
        case "full":
            number = setting.recompute.num_layers
            if setting.recompute.method == "uniform":
                again = max((sum(full[i : i + number]) for i in range(len(full))), default=0.0)
            else:
                again = max(0.0, max(full[:number], default=0.0) - sum(full[number:]))
        case "selective":
            kept = (activations.layer_nbytes(layer, setting) for layer in layers)
            again = max((a - b for a, b in zip(full, kept, strict=True)), default=0.0)
        case _:
            again = 0.0
    return again + gradients


def stage_activations(setting: RunShape, stage: int) -> Activations:
    chunks = chunk_layers(setting.model, setting.parallel, stage)
    layers = [layer for chunk in chunks for layer in chunk]
    is_last = stage == setting.parallel.pp - 1
    mtp = setting.model.mtp if is_last else ()
    nbytes = sum(_kept_of_layers(chunk, setting) for chunk in chunks)
    if stage == 0 and setting.model.adapters and setting.recompute.granularity != "full":
        # Before the first adapter nothing has a gradient.
        nbytes -= activations.norm_nbytes(setting.model.hidden, setting.outside, setting)
    if setting.parallel.pp > 1:  # what a stage received, for as long as its gradient is not sent
        received = setting.parallel.virtual - (stage == 0)  # the model's first chunk reads tokens
        nbytes += setting.hidden_nbytes * received
    kept = nbytes * micro_batches_in_flight(setting, stage)
    logits = buffer = 0.0
    if is_last:
        # The last norm and the predictions of further tokens belong to one micro-batch at a time.
        kept += activations.final_norm_nbytes(setting) * (1 + len(mtp))
        kept += sum(
            activations.layer_nbytes(layer, setting) + 4 * setting.hidden_nbytes for layer in mtp
        )
        logits = activations.loss_nbytes(setting) * (1 + len(mtp))
    if setting.kernels.core == "scores" and not setting.kernels.is_fused:
        buffer = max((activations.buffer_nbytes(layer, setting) for layer in layers), default=0.0)
    whole = replace(setting, recompute=activations.Recompute())
    whole_layer = max((activations.layer_nbytes(layer, whole) for layer in layers), default=0.0)
    kept_layer = sum(_kept_of_layers(chunk, setting) for chunk in chunks) / max(1, len(layers))
    working = _working([*layers, *mtp], setting)
    return Activations(kept, logits, working, whole_layer, kept_layer, buffer)


# ---- the whole


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank."""

    at_rest: Mapping[str, float]  # by state
    in_flight: Mapping[str, float]  # by kind
    # the largest unit whole: construction holds one, and backward as autograd's gradients
    whole_unit: float
    activations: Activations
    copied_params: float = 0.0  # that a backend copies at most while it gathers (gloo: a unit)
    copied_grads: float = 0.0  # that a backend copies at most while it reduces (gloo: a piece)
    # gradients as autograd makes them, at most; None for those of the largest unit
    own_grads: float | None = None
    copies_beside: bool = False  # whether it copies at any time of the computation
    away: float = 0.0  # main parameters that are on the host from the first update on

    @classmethod
    def of_rank(
        cls,
        at_rest: Mapping[str, float],
        in_flight: Sequence[MemoryInFlight],
        whole_unit: float,
        active: Activations,
        schedule: ScheduleConfig,
        copies: Copies | None = None,
        preview: float = 0.0,
        quantised: float = 0.0,
        buffers: float = 0.0,
        away: float = 0.0,
    ) -> "Memory":
        """Sum up a rank.

        in_flight: of each model chunk; copies: on a CPU; preview: of an early update; quantised:
        copies of weights; buffers: of communicators; away: see Memory.
        """
        total = Counter[str]()
        for chunk in in_flight:
            total.update(chunk.allocated)
        more = copies or Copies()
        beside = {
            # The most that budgets keep from one micro-batch to a later one: all of their bytes.
            "kept parameters": schedule.keep_params_nbytes,
            "kept gradients": schedule.keep_grads_nbytes,
            "preview of an update": preview,
            "quantised copies of weights": quantised,
            "buffers of communicators": buffers,
        }
        return cls(
            at_rest,
            {**total, **{kind: float(nbytes) for kind, nbytes in beside.items() if nbytes}},
            whole_unit,
            active,
            copied_params=more.params,
            copied_grads=more.grads,
            own_grads=max(chunk.own_grads for chunk in in_flight) + more.casts,
            copies_beside=copies is not None and not schedule.is_inline,
            away=away,
        )

    @property
    def states(self) -> float:
        return sum(self.at_rest.values())

    @property
    def flying(self) -> float:
        return sum(self.in_flight.values())

    @property
    def start(self) -> float:
        later = self.at_rest[_MOMENTS] + self.at_rest.get(_ROOM, 0.0)
        return self.states - later + self.away + self.flying + self.whole_unit

    @property
    def working(self) -> float:
        """Bytes during the backward of a layer, whose activations give way to gradients."""
        own_grads = self.whole_unit if self.own_grads is None else self.own_grads
        return self.activations.working + max(0.0, own_grads - self.activations.whole_layer)

    @property
    def training(self) -> float:
        """The peak of a step: while the loss is computed, or in the backward pass of a layer.

        A backend's copies may be added. Without overlap with the computation, a unit is gathered
        before its backward and reduced after its activations are free.
        """
        beside = max(self.activations.logits, self.working)
        if self.copies_beside:
            beside += self.copied_params + self.copied_grads
        else:
            reducing = self.copied_grads - self.activations.kept_layer
            beside = max(beside, self.copied_params, reducing)
        kept = self.activations.kept + self.activations.buffer
        return self.states + self.flying + kept + beside

    @property
    def total(self) -> float:
        return max(self.start, self.training)

    def left_of(self, device_nbytes: float) -> float:
        return device_nbytes - self.total
