# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of ranks: which ranks share a shard, and which shard a rank owns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from megatron_asynchzp.errors import raise_first


class Range(NamedTuple):
    """A half-open range of elements of a flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, other: "Range") -> "Range":
        """Return the common part; it is empty (numel 0) if there is none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def within(self, outer: "Range") -> "Range":
        """Return this range in the coordinates of `outer`, which must contain it."""
        if not (outer.start <= self.start and self.stop <= outer.stop):
            raise ValueError(f"{self} is not within {outer}")
        return Range(self.start - outer.start, self.stop - outer.start)


LONGEST_AXIS = 64
"""The most ranks along an axis before it is cut: NCCL's ring over 64 nodes takes 0.9 ms for any
number of bytes."""


@dataclass(frozen=True)
class ShardSizes:
    """How many ranks share a copy of each state (AsyncHZP section 3: Z3 | Z2 | Z1)."""

    param: int  # ranks per copy of the model parameters (Z3)
    grad: int  # ranks per copy of the gradients (Z2)
    optim: int  # ranks per copy of the optimizer state and main parameters (Z1)
    cuts: tuple[int, ...] = ()
    """Further ends of mesh axes, in ranks, each a multiple of the previous one. A collective along
    an axis takes a hop per rank, so two short axes take fewer hops than one long axis.
    `with_short_axes` chooses them."""

    def boundaries(self, world_size: int) -> list[int]:
        """Return the ends of all mesh axes, in ranks, from 1 to `world_size`."""
        return sorted({1, self.param, self.grad, self.optim, world_size, *self.cuts})

    def check(self, world_size: int) -> None:
        """Raise ConfigurationError unless sizes and cuts nest and divide `world_size`.

        Nested sizes put a rank's optimizer shard inside its gradient and parameter shards, so no
        byte moves between the three.
        """
        raise_first(self._faults(world_size))

    def _faults(self, world_size: int) -> Iterator[str]:
        for name in ("param", "grad", "optim"):
            title = f"{name} shard size {(size := getattr(self, name))}"
            if size < 1:
                yield f"{title} is not a positive number of ranks. Choose 1 to {world_size}."
            if size > world_size:
                yield (
                    f"{title} exceeds the {world_size} ranks of the sharding group. "
                    f"Choose at most {world_size}."
                )
        for name in ("param", "grad"):
            if self.optim % (size := getattr(self, name)):
                yield (
                    f"optim shard size {self.optim} is not a multiple of the {name} shard size "
                    f"{size}. Raise the optim or lower the {name} shard size."
                )
        small, large = sorted((self.param, self.grad))
        if large % small:
            yield (
                f"param shard size {self.param} and grad shard size {self.grad} do not nest. "
                f"Choose a multiple of {small} in place of {large}."
            )
        if world_size % self.optim:
            yield (
                f"optim shard size {self.optim} does not divide the {world_size} ranks of the "
                f"sharding group. Choose a divisor of {world_size}."
            )
        for cut in self.cuts:
            if not 1 <= cut <= self.optim:
                yield (
                    f"an axis of the mesh cannot be cut at {cut} ranks, as the optim shard size is "
                    f"{self.optim}. Choose cuts from 1 to {self.optim}."
                )
        ends = self.boundaries(world_size)
        for inner, outer in zip(ends, ends[1:]):
            if outer % inner:
                yield (
                    f"the axes of the mesh would end at {', '.join(map(str, ends))} ranks, and "
                    f"{inner} does not divide {outer}. Choose cuts that nest with the shard sizes."
                )

    def restricted_to(self, world_size: int) -> "ShardSizes":
        """Return the sizes for a smaller group (experts): gcds with its size, which nest."""
        sizes = (gcd(size, world_size) for size in (self.param, self.grad, self.optim))
        return ShardSizes(*sizes, cuts=tuple(sorted({gcd(cut, world_size) for cut in self.cuts})))

    def with_short_axes(self, in_node: int) -> "ShardSizes":
        """Cut every axis of more than LONGEST_AXIS ranks, except that of the replicas.

        If whole nodes of `in_node` consecutive ranks fit into a cut axis, a node becomes an axis.
        """
        cuts = set(self.cuts)
        ends = self.boundaries(self.optim)
        for inner, outer in zip(ends, ends[1:]):
            if outer // inner <= LONGEST_AXIS:
                continue
            is_part = inner < in_node < outer and in_node % inner == outer % in_node == 0
            end = in_node if is_part else inner
            cuts.add(end)
            for factor in _even_factors(outer // end)[:-1]:
                end *= factor
                cuts.add(end)
        return replace(self, cuts=tuple(sorted(cuts - {1, self.param, self.grad, self.optim})))


@dataclass(frozen=True)
class MeshAxis:
    """An axis of a sharding group's mesh, seen from a rank."""

    size: int  # ranks along the axis
    stride: int  # distance of neighbours in group rank
    coordinate: int  # this rank's position
    members: range  # group ranks along the axis, including this rank


@dataclass(frozen=True)
class ShardTopology:
    """The mesh of a sharding group (law 1) and the place of a rank in it.

    The sorted sizes and cuts are the ends of the axes, innermost (the fastest link) first. A state
    of shard size Z is sharded over the inner axes whose product is Z, so ranges nest:

        8 ranks, param 2, grad 4, optim 8          axes (inner first) 2, 2, 2
        rank       0    1    2    3    4    5    6    7
        param    [ A ][ B ][ A ][ B ][ A ][ B ][ A ][ B ]     halves
        grad     [A0 ][B0 ][A1 ][B1 ][A0 ][B0 ][A1 ][B1 ]     a half of that half
        optim    [A00][B00][A10][B10][A01][B01][A11][B11]     a half of that quarter
    """

    world_size: int  # ranks of the sharding group
    rank: int  # this rank in the sharding group
    sizes: ShardSizes

    def __post_init__(self) -> None:
        self.sizes.check(self.world_size)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a group of {self.world_size}")

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        """Axes of size > 1, innermost first; the product of their sizes is `world_size`."""
        ends = self.sizes.boundaries(self.world_size)
        return tuple(self._axis(inner, outer) for inner, outer in zip(ends, ends[1:]))

    def _axis(self, inner: int, outer: int) -> MeshAxis:
        size = outer // inner
        coordinate = self.rank // inner % size
        first = self.rank - coordinate * inner
        return MeshAxis(size, inner, coordinate, range(first, first + size * inner, inner))

    def lines(self, axis: MeshAxis) -> Iterator[range]:
        span = axis.stride * axis.size
        for start in range(0, self.world_size, span):
            for first in range(start, start + axis.stride):
                yield range(first, start + span, axis.stride)

    def axes_between(self, inner: int, outer: int) -> tuple[MeshAxis, ...]:
        """Return the axes between shards of size `inner` and `outer`, innermost first."""
        return tuple(a for a in self.axes if inner <= a.stride and a.stride * a.size <= outer)

    @property
    def param_axes(self) -> tuple[MeshAxis, ...]:
        """Gathered (outermost first) before a unit computes."""
        return self.axes_between(1, self.sizes.param)

    @property
    def grad_axes(self) -> tuple[MeshAxis, ...]:
        """Reduce-scattered (innermost first) after each micro-batch."""
        return self.axes_between(1, self.sizes.grad)

    @property
    def grad_sync_axes(self) -> tuple[MeshAxis, ...]:
        """Reduce-scattered once per step, from the gradient shard to the optimizer shard."""
        return self.axes_between(self.sizes.grad, self.sizes.optim)

    @property
    def replica_axes(self) -> tuple[MeshAxis, ...]:
        """All-reduced once per step: ranks that own the same optimizer shard."""
        return self.axes_between(self.sizes.optim, self.world_size)

    @property
    def param_sync_axes(self) -> tuple[MeshAxis, ...]:
        """Gathered (outermost first) once per step, from the optimizer to the parameter shard."""
        return self.axes_between(self.sizes.param, self.sizes.optim)

    @property
    def replica_index(self) -> int:
        """The number of this rank's copy of the optimizer state; copy 0 counts in norms."""
        return self.rank // self.sizes.optim

    def shard_range(self, shard_size: int, numel: int) -> Range:
        if numel % shard_size:
            raise ValueError(f"{numel} elements do not divide over {shard_size} ranks")
        start, length = 0, numel
        for axis in self.axes_between(1, shard_size):
            length //= axis.size
            start += axis.coordinate * length
        if length * shard_size != numel:
            raise ValueError(f"shard size {shard_size} is not a product of inner axes")
        return Range(start, start + length)


def _even_factors(size: int) -> list[int]:
    """Split `size` into the fewest, most equal factors, descending.

    None exceeds LONGEST_AXIS, unless a prime factor does.
    """
    primes, rest, divisor = list[int](), size, 2
    while rest > 1:
        if divisor * divisor > rest:
            divisor = rest
        if rest % divisor:
            divisor += 1
        else:
            primes.append(divisor)
            rest //= divisor
    count = 1
    while True:
        factors = [1] * count
        for prime in reversed(primes):
            smallest = factors.index(min(factors))
            factors[smallest] *= prime
        if max(factors) <= max(LONGEST_AXIS, *primes):
            return sorted(factors, reverse=True)
        count += 1


def spans_nodes(global_ranks: Sequence[int], ranks_per_node: int) -> bool:
    return len({rank // ranks_per_node for rank in global_ranks}) > 1
