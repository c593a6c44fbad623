# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of memory in flight: bytes that units need in addition to their states."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron_asynchzp.engine.sharding.layout import FP32_NBYTES, piece_length, round_up
from megatron_asynchzp.engine.sharding.seats import assign_seats, seats_nbytes
from megatron_asynchzp.engine.sharding.topology import ShardTopology
from megatron_asynchzp.errors import ConfigurationError

ALIGNMENT_NBYTES = 128
"""Alignment of every place in memory in flight."""
_GRAD_SLOTS = 2  # layers (or pieces) of each size whose gradients are in flight
LARGE_GRAD_NBYTES = 2**20
"""Gradients of at least this size are collected as soon as autograd has made them."""


def reduction_nbytes(numel: int, axis_sizes: Sequence[int], wire_nbytes: int = FP32_NBYTES) -> int:
    """Return the bytes to reduce-scatter `numel` fp32 elements axis by axis.

    They are the elements, each axis's result, and a copy if `wire_nbytes` is not 4.
    """
    total = FP32_NBYTES * numel
    if axis_sizes and wire_nbytes != FP32_NBYTES:
        total += wire_nbytes * numel
    for size in axis_sizes:
        numel //= size
        total += FP32_NBYTES * numel
    return total


def grads_before_added_nbytes(sizes: Mapping[int, int]) -> int:
    """Return the peak bytes of autograd's own gradients; `sizes` counts them by their bytes.

    Each large gradient is added to main_grad at once, the small ones when all of them exist.
    """
    small = sum(size * count for size, count in sizes.items() if size < LARGE_GRAD_NBYTES)
    return small + max((size for size in sizes if size >= LARGE_GRAD_NBYTES), default=0)


@dataclass(frozen=True)
class UnitInFlight:
    """Bytes that one unit needs in addition to its states."""

    layer: str  # equal for units needed at the same time; "" for a unit needed around all layers
    params: int  # gathered parameters; 0 if they are never sharded
    grads: int  # to reduce the largest piece of its gradients in fp32; 0 if it is not reduced
    own_grads: int  # all its gradients as autograd makes them
    num_pieces: int  # pieces in which its gradients are reduced
    is_seated: bool = False  # whether its parameters have a seat (seats.py)

    @classmethod
    def of(
        cls,
        layer: str,
        padded_numel: int,
        itemsize: int,  # of the parameters
        is_trained: bool,
        topology: ShardTopology,
        slot_nbytes: int,
        wire_nbytes: int = FP32_NBYTES,  # of a gradient's element
    ) -> "UnitInFlight":
        is_gathered, num_shards = topology.sizes.param > 1, topology.sizes.grad
        length = piece_length(padded_numel, num_shards, slot_nbytes)
        piece = reduction_nbytes(
            num_shards * length, [axis.size for axis in topology.grad_axes], wire_nbytes
        )
        is_reduced = is_trained and num_shards > 1
        return cls(
            layer,
            itemsize * padded_numel if is_gathered else 0,
            piece if is_reduced else 0,
            itemsize * padded_numel if is_trained else 0,
            -(-padded_numel // (num_shards * length)) if is_reduced else 1,
        )


@dataclass(frozen=True)
class MemoryInFlight:
    """Bytes of a model chunk in flight."""

    params: int  # for gathered parameters; allocated before the first step and kept
    grads: int  # for gradients that are reduced; allocated before the first step and kept
    own_grads: int  # the most that autograd's own gradients take from torch's allocator

    @property
    def allocated(self) -> dict[str, int]:
        return {"gathered parameters": self.params, "gradients to reduce": self.grads}


def _layers_of(units: Sequence[UnitInFlight]) -> tuple[UnitInFlight, list[UnitInFlight]]:
    layers: dict[str, list[UnitInFlight]] = {}
    for unit in units:
        layers.setdefault(unit.layer, []).append(unit)
    around = layers.pop("", [])
    if not layers:
        layers, around = {"": around}, []
    return _merged(around), [_merged(layer) for layer in layers.values()]


def _merged(units: Sequence[UnitInFlight]) -> UnitInFlight:
    return UnitInFlight(
        units[0].layer if units else "",
        sum(unit.params for unit in units),
        sum(unit.grads for unit in units),
        sum(unit.own_grads for unit in units),
        max((unit.num_pieces for unit in units), default=1),
    )


def _neighbours_nbytes(layers: Sequence[int], most: int) -> int:
    """Return the largest sum over consecutive layers with at most `most` layers of each size.

    E L L L L E, most 2:       E L L | L L | L L E            so E + 2 L
    """
    largest = 0
    for first in range(len(layers)):
        neighbours: list[int] = []
        for size in layers[first:]:
            if neighbours.count(size) == most:
                break
            neighbours.append(size)
        largest = max(largest, sum(neighbours))
    return largest


def _own_grads_nbytes(around: UnitInFlight, layers: Sequence[UnitInFlight]) -> int:
    # A layer that is reduced in several pieces keeps its gradients until all pieces are reduced.
    # Meanwhile backward makes those of the layer before it; before the first layer comes the last
    # layer of the next micro-batch.
    pairs = zip(layers, [*layers[1:], layers[0]], strict=True)
    most = max(new.own_grads + (kept.num_pieces > 1) * kept.own_grads for new, kept in pairs)
    return most + around.own_grads


def memory_in_flight(
    units: Sequence[UnitInFlight],
    num_ahead: int = 1,  # layers of each size gathered ahead of the computation
    budget: int | None = None,  # the most bytes, parameters first: the computation waits for them
) -> MemoryInFlight:
    """Return the memory in flight of a model chunk of `units`, in the order of their use.

    Raises ConfigurationError for a budget that is too small for a layer.
    """
    seated = seats_nbytes(
        assign_seats([(unit.layer, unit.params) for unit in units if unit.is_seated], num_ahead)
    )
    floating = [replace(unit, params=0) if unit.is_seated else unit for unit in units]
    around, layers = _layers_of(floating)
    params = around.params + _neighbours_nbytes([layer.params for layer in layers], num_ahead + 1)
    params += seated
    grads = around.grads + _neighbours_nbytes([layer.grads for layer in layers], _GRAD_SLOTS)
    layer, piece = least_in_flight(units)
    if any(unit.num_pieces > 1 for unit in units):
        grads = min(grads, _GRAD_SLOTS * piece)
    if budget is not None and params + grads > budget:
        if seated:
            raise ConfigurationError(_too_small_for_seats(budget, params + grads))
        if layer + piece > budget:
            raise ConfigurationError(_too_small(budget, layer, piece))
        params = min(params, aligned(budget - piece))
        grads = min(grads, aligned(budget - params))
    return MemoryInFlight(params, grads, _own_grads_nbytes(around, layers))


def least_in_flight(units: Sequence[UnitInFlight]) -> tuple[int, int]:
    """Return the bytes of the largest layer with the units around it, and of the largest piece."""
    around, layers = _layers_of(units)
    most = max(layer.params for layer in layers)
    return around.params + most, max(unit.grads for unit in units)


def units_gathered_together(units: Sequence[UnitInFlight]) -> dict[int, list[int]]:
    """Map each unit that shares a layer to the units gathered at the same time, by index."""
    gathered = [index for index, unit in enumerate(units) if unit.params and not unit.is_seated]
    around = [index for index in gathered if not units[index].layer]
    layers: dict[str, list[int]] = {}
    for index in gathered:
        if units[index].layer:
            layers.setdefault(units[index].layer, []).append(index)
    return {
        index: [*around, *(neighbour for neighbour in members if neighbour != index)]
        for members in layers.values()
        for index in members
        if len(members) > 1
    }


def placed_from_top(nbytes: Sequence[int]) -> list[bool]:
    """Return for each unit, given its bytes of parameters, whether it is placed from the top.

    The largest units lie at one end, the next size at the other, and so on. Units of equal size
    then use the same places again, and free memory stays in one piece.
    """
    sizes = sorted(set(nbytes), reverse=True)
    return [sizes.index(size) % 2 == 1 for size in nbytes]


def aligned(nbytes: int) -> int:
    return nbytes // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES


def _too_small_for_seats(budget: int, needed: int) -> str:
    return (
        f"memory in flight of {budget / 2**30:.4g} GiB is less than the {needed / 2**30:.4g} GiB "
        "that a model chunk needs with CUDA graphs, which read a layer's parameters at one "
        "address. Raise it, or drop CUDA graphs."
    )


def _too_small(budget: int, params: int, grads: int) -> str:
    return (
        f"memory in flight of {budget / 2**30:.4g} GiB is less than the largest layer of a model "
        f"chunk needs: {params / 2**30:.4g} GiB for parameters and {grads / 2**30:.4g} GiB for one "
        f"piece of gradients. Raise it to {(params + grads) / 2**30:.4g} GiB."
    )


NUM_PLACES = 2
"""Units whose states are on the device: one is copied while the other is updated."""

_ALIGNMENT = 512  # bytes


def num_on_host(numels: Sequence[int], fraction: float) -> int:
    least = fraction * sum(numels)
    sums = accumulate(numels, initial=0)
    return next(num for num, numel in enumerate(sums) if numel >= least or num == len(numels))


def aligned_nbytes(nbytes: int) -> int:
    """Round `nbytes` up to the distance of tensors that follow one another in a copy."""
    return round_up(nbytes, _ALIGNMENT)


def room_nbytes(units_nbytes: Iterable[float]) -> float:
    """Return the device memory to update units with `units_nbytes` of states on the host."""
    return NUM_PLACES * max(units_nbytes, default=0)
