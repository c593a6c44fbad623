# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the arithmetic of memory in flight: what units need beside their states while a step runs,
and how much of it fits a budget. Needs no tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.sharding.layout import FP32_NBYTES
from megatron_asynchzp.sharding.pieces import piece_length
from megatron_asynchzp.sharding.seats import seats_nbytes, seats_of
from megatron_asynchzp.sharding.topology import ShardTopology

ALIGNMENT_NBYTES = 128
"""Every place in memory in flight starts at a multiple of this many bytes."""
LARGE_GRAD_NBYTES = 2**20
"""From this size on a gradient is taken as soon as it is there."""


def reduction_nbytes(numel: int, axis_sizes: Sequence[int], wire_nbytes: int = FP32_NBYTES) -> int:
    """Bytes to reduce-scatter `numel` fp32 elements over axes: themselves, the result of each axis
    and, where an element of `wire_nbytes` travels, a copy that is sent."""
    total = FP32_NBYTES * numel
    if axis_sizes and wire_nbytes != FP32_NBYTES:
        total += wire_nbytes * numel
    for size in axis_sizes:
        numel //= size
        total += FP32_NBYTES * numel
    return total


def grads_before_added_nbytes(sizes: Mapping[int, int]) -> int:
    """Bytes of autograd's own gradients where each large one is added to main_grad at once, and the
    small ones when all are there. sizes: bytes of a gradient, with how many have so many."""
    small = sum(size * count for size, count in sizes.items() if size < LARGE_GRAD_NBYTES)
    return small + max((size for size in sizes if size >= LARGE_GRAD_NBYTES), default=0)


@dataclass(frozen=True)
class UnitInFlight:
    """Bytes that one unit needs beside its states.

    layer: equal for units that are needed at the same time; "" for one that is needed around all
        others.
    params: its gathered parameters, 0 where they always are.
    grads: the largest piece of its gradients in fp32, with what reducing it takes, 0 where they are
        not reduced.
    own_grads: all its gradients as autograd makes them.
    num_pieces: in how many its gradients are reduced.
    is_seated: whether its parameters have a seat.
    """

    layer: str
    params: int
    grads: int
    own_grads: int
    num_pieces: int
    is_seated: bool = False

    @classmethod
    def of(
        cls,
        layer: str,
        padded_numel: int,
        itemsize: int,
        is_trained: bool,
        topology: ShardTopology,
        slot_nbytes: int,
        wire_nbytes: int = FP32_NBYTES,
    ) -> "UnitInFlight":
        """A unit of `padded_numel` elements of `itemsize` bytes, whose gradients are reduced in
        pieces of at most `slot_nbytes` (in fp32) and travel in elements of `wire_nbytes`."""
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
    """Bytes that are allocated before the first step and kept.

    params: for gathered parameters.
    grads: for gradients that are reduced.
    own_grads: at most, what autograd's own gradients take beside them, from its allocator.
    """

    params: int
    grads: int
    own_grads: int

    @property
    def allocated(self) -> dict[str, int]:
        """Bytes that are allocated, by what they are for."""
        return {"gathered parameters": self.params, "gradients to reduce": self.grads}


def _layers_of(units: Sequence[UnitInFlight]) -> tuple[UnitInFlight, list[UnitInFlight]]:
    """Return the units that are needed around all others, and the layers in order, each as one."""
    found: dict[str, list[UnitInFlight]] = {}
    for unit in units:
        found.setdefault(unit.layer, []).append(unit)
    around = found.pop("", [])
    if not found:
        found, around = {"": around}, []
    return _together(around), [_together(layer) for layer in found.values()]


def _together(units: Sequence[UnitInFlight]) -> UnitInFlight:
    return UnitInFlight(
        units[0].layer if units else "",
        sum(unit.params for unit in units),
        sum(unit.grads for unit in units),
        sum(unit.own_grads for unit in units),
        max((unit.num_pieces for unit in units), default=1),
    )


def _neighbours_nbytes(layers: Sequence[int], most: int) -> int:
    """The most that layers of so many bytes, which follow one another, take, `most` of each size at
    a time.

    layers E L L L L E, most 2:       E L L | L L | L L E            so E + 2 L
    """
    largest = 0
    for first in range(len(layers)):
        taken: list[int] = []
        for size in layers[first:]:
            if taken.count(size) == most:
                break
            taken.append(size)
        largest = max(largest, sum(taken))
    return largest


def _own_grads_nbytes(around: UnitInFlight, layers: Sequence[UnitInFlight]) -> int:
    # Gradients that are reduced in several pieces stay until all of them have been, while those of
    # the layer before come: before the first layer, those of the last one in the next micro-batch.
    pairs = zip(layers, [*layers[1:], layers[0]], strict=True)
    most = max(one.own_grads + (kept.num_pieces > 1) * kept.own_grads for one, kept in pairs)
    return most + around.own_grads


def memory_in_flight(
    units: Sequence[UnitInFlight],
    num_ahead: int = 1,
    num_grad_slots: int = 2,
    budget: int | None = None,
) -> MemoryInFlight:
    """Return the memory in flight of a model chunk of `units` (in the order of their use).

    num_ahead: layers of each size that are gathered ahead of the one that computes.
    num_grad_slots: layers of each size, or where units are reduced in several pieces, pieces, whose
        gradients are in flight.
    budget: at most so many bytes for parameters and gradients together, None for as many as that
        needs. Parameters come first: computation waits for them.

    Raises ConfigurationError for a budget below what one layer needs.
    """
    seated, floating = _seats_nbytes(units, num_ahead), _without_seats(units)
    around, layers = _layers_of(floating)
    params = around.params + _neighbours_nbytes([one.params for one in layers], num_ahead + 1)
    params += seated
    grads = around.grads + _neighbours_nbytes([one.grads for one in layers], num_grad_slots)
    layer, piece = least_in_flight(units)
    if any(unit.num_pieces > 1 for unit in units):
        grads = min(grads, num_grad_slots * piece)
    if budget is not None and params + grads > budget:
        if seated:
            raise ConfigurationError(_too_small_for_seats(budget, params + grads))
        if layer + piece > budget:
            raise ConfigurationError(_too_small(budget, layer, piece))
        params = min(params, aligned(budget - piece))
        grads = min(grads, aligned(budget - params))
    return MemoryInFlight(params, grads, _own_grads_nbytes(around, layers))


def _seats_nbytes(units: Sequence[UnitInFlight], num_ahead: int) -> int:
    seated = [(unit.layer, unit.params) for unit in units if unit.is_seated]
    return seats_nbytes(seats_of(seated, num_ahead))


def _without_seats(units: Sequence[UnitInFlight]) -> list[UnitInFlight]:
    """The same units, of which those with a seat need no other place for their parameters."""
    return [replace(unit, params=0) if unit.is_seated else unit for unit in units]


def least_in_flight(units: Sequence[UnitInFlight]) -> tuple[int, int]:
    """Bytes without which no step is possible: parameters of the largest layer, with what is needed
    around all layers; and the largest piece of gradients."""
    around, layers = _layers_of(units)
    most = max(layer.params for layer in layers)
    return around.params + most, max(unit.grads for unit in units)


def needed_together(units: Sequence[UnitInFlight]) -> dict[int, list[int]]:
    """Return, for each unit of a layer that has several, by index, the units that are gathered
    while it is, around all layers and in its own."""
    gathered = [index for index, unit in enumerate(units) if unit.params and not unit.is_seated]
    around = [index for index in gathered if not units[index].layer]
    layers: dict[str, list[int]] = {}
    for index in gathered:
        if units[index].layer:
            layers.setdefault(units[index].layer, []).append(index)
    return {
        index: [*around, *(other for other in members if other != index)]
        for members in layers.values()
        for index in members
        if len(members) > 1
    }


def seen_from_top(nbytes: Sequence[int]) -> list[bool]:
    """Say of each unit, of so many bytes of parameters, whether its place is sought from the top.

    The largest units lie at one end, those of the next size at the other, and so on in turn: units
    of one size then use the same places again, and leave the rest in one piece.
    """
    sizes = sorted(set(nbytes), reverse=True)
    return [sizes.index(size) % 2 == 1 for size in nbytes]


def aligned(nbytes: int) -> int:
    """The most of `nbytes` that places can fill."""
    return nbytes // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES


def _too_small_for_seats(budget: int, needed: int) -> str:
    return (
        f"memory in flight of {budget / 2**30:.4g} GiB, for one model chunk, is less than the "
        f"{needed / 2**30:.4g} GiB that it needs beside CUDA graphs, which read a layer's "
        "parameters at one address"
    )


def _too_small(budget: int, params: int, grads: int) -> str:
    return (
        f"memory in flight of {budget / 2**30:.4g} GiB, for one model chunk, is less than its "
        "largest layer needs: "
        f"{(params + grads) / 2**30:.4g} GiB ({params / 2**30:.4g} for its parameters, "
        f"{grads / 2**30:.4g} for one piece of gradients)"
    )
