# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a model of one training step: how long it takes, what leaves a node and what a rank holds,
for four ways to share a model out.

A step is a list of operations. Each belongs to a lane, in whose order it runs, comes after others,
and occupies one resource for its length: the computing of a rank, the link of a node to the
others, or the fabric inside a node. All ranks do the same, so one rank and its node are enough.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_asynchzp.sharding.in_flight import UnitInFlight, memory_in_flight
from scripts.testbed.profile import NetworkProfile

COMPUTE, INSIDE, BETWEEN = "compute", "inside", "between"
_STEPS = 4  # until one is like the one before
_BYTES = 4  # fp32 parameters, gradients and both moments

Work = tuple[str, float]
"""A resource and for how many milliseconds."""


@dataclass(frozen=True)
class Unit:
    """What is gathered and reduced together. forward_ms: of one micro-batch; the backward takes
    twice that."""

    nbytes: int
    forward_ms: float


@dataclass(frozen=True)
class ModelledRun:
    """layers of `layer_numel` parameters each, between an embedding and a head that take no time;
    layer_ms: forward of one layer and micro-batch on a rank; nodes x ranks_per_node on `profile`,
    whose own ranks_per_node does not count."""

    profile: NetworkProfile
    nodes: int
    ranks_per_node: int
    layers: int
    layer_numel: int
    layer_ms: float
    micro_batches: int = 1
    embedding_numel: int = 0
    head_numel: int = 0

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def compute_ms(self) -> float:
        """Of a step that never waits."""
        return 3 * self.micro_batches * self.layers * self.layer_ms

    @property
    def units(self) -> list[Unit]:
        """In the order of the forward."""
        ends = [
            [Unit(_BYTES * numel, 0.0)] * (numel > 0)
            for numel in (self.embedding_numel, self.head_numel)
        ]
        layer = Unit(_BYTES * self.layer_numel, self.layer_ms)
        return [*ends[0], *[layer] * self.layers, *ends[1]]

    @property
    def nbytes(self) -> int:
        """Of all parameters."""
        return sum(unit.nbytes for unit in self.units)

    # ---- an all-gather or a reduce-scatter of `nbytes`, the whole tensor

    def in_node(self, nbytes: int) -> Work:
        """Over the ranks of a node; its ranks share the fabric."""
        return INSIDE, (self.ranks_per_node - 1) * _ms(nbytes, self.profile, False)

    def across_nodes(self, nbytes: int) -> Work:
        """Of what one rank holds of it, over the ranks at its place in the other nodes; a node's
        ranks share its link."""
        return BETWEEN, (self.nodes - 1) * _ms(nbytes / self.nodes, self.profile, True)

    def flat(self, nbytes: int) -> Work:
        """Over all ranks, one ring that enters and leaves every node once."""
        if self.nodes == 1:
            return self.in_node(nbytes)
        shard = nbytes / self.num_ranks
        inside = 0.0
        if self.ranks_per_node > 1:
            inside = _ms((self.ranks_per_node - 1) * shard, self.profile, False)
        return BETWEEN, (self.num_ranks - 1) * max(inside, _ms(shard, self.profile, True))


def _ms(nbytes: float, profile: NetworkProfile, is_inter: bool) -> float:
    return nbytes * 8e-6 / profile.gbit(is_inter) + 1e3 * profile.latency_s(is_inter)


@dataclass
class _Operation:
    lane: str
    resource: str
    length_ms: float
    after: list["_Operation"] = field(repr=False)  # each has its own: the text would be endless
    end_ms: float | None = None


@dataclass
class _Program:
    """What all steps issue, lane by lane."""

    lanes: dict[str, list[_Operation]] = field(default_factory=lambda: defaultdict(list))

    def add(self, lane: str, work: Work, after: Iterable[_Operation | None] = ()) -> _Operation:
        operation = _Operation(lane, *work, [one for one in after if one is not None])
        self.lanes[lane].append(operation)
        return operation

    def run(self) -> None:
        """Give every operation its end: the first one that is ready gets the resource."""
        free: dict[str, float] = defaultdict(float)
        lane_end: dict[str, float] = defaultdict(float)
        heads = dict.fromkeys(self.lanes, 0)
        for _ in range(sum(map(len, self.lanes.values()))):
            ready = []
            for lane, head in heads.items():
                if head == len(self.lanes[lane]):
                    continue
                one = self.lanes[lane][head]
                if all(before.end_ms is not None for before in one.after):
                    ready_ms = max([lane_end[lane], *(before.end_ms for before in one.after)])
                    ready.append((max(ready_ms, free[one.resource]), ready_ms, lane))
            begin_ms, _, lane = min(ready)
            one = self.lanes[lane][heads[lane]]
            one.end_ms = begin_ms + one.length_ms
            free[one.resource] = lane_end[lane] = one.end_ms
            heads[lane] += 1


class System:
    """One way to share a model out. name: as the contenders are called."""

    name = ""
    gathers = True
    """Whether each use of a unit gathers it."""

    def __init__(self, run: ModelledRun):
        self.run = run

    def step_ms(self) -> float:
        """From the end of one step's computation to that of the next."""
        program, updated, ends = _Program(), [None] * len(self.run.units), []
        for _ in range(_STEPS):
            last, updated = self._add_step(program, updated)
            ends.append(last)
        program.run()
        return ends[-1].end_ms - ends[-2].end_ms

    # ---- what differs

    def node_nbytes(self) -> float:
        """Bytes that leave a node in a step."""
        raise NotImplementedError

    def state_nbytes(self) -> float:
        """Bytes that the fullest rank holds between two steps, fixed buffers included."""
        raise NotImplementedError

    def gather(self, nbytes: int) -> Work:
        raise NotImplementedError

    def reduce(
        self, program: _Program, computed: _Operation, nbytes: int, is_last: bool
    ) -> _Operation | None:
        """What follows the backward of a unit; returns what its slot waits for."""
        raise NotImplementedError

    def update(self, program: _Program, computed: _Operation) -> list[_Operation]:
        """After the last backward: for each unit what its next use waits for."""
        stepped = program.add("main", (COMPUTE, 0.0), [computed, *self._synced])
        return [stepped] * len(self.run.units)

    # ---- what does not

    def _add_step(
        self, program: _Program, updated: list[_Operation | None]
    ) -> tuple[_Operation, list[_Operation]]:
        """Its last backward, and for each unit what the next step waits for."""
        units = self.run.units
        uses: list[_Operation] = []
        reductions: list[_Operation | None] = []
        self._synced: list[_Operation] = []

        def use(index: int, length_ms: float, is_kept: bool) -> _Operation:
            after = [updated[index]]
            if self.gathers and not is_kept:
                # Two slots: the unit before the one before must have been computed with.
                free = uses[-2] if len(uses) > 1 else None
                after = [program.add("gather", self.gather(units[index].nbytes), [*after, free])]
            if len(reductions) > 1:
                after.append(reductions[-2])  # two slots for gradients
            uses.append(program.add("main", (COMPUTE, length_ms), after))
            return uses[-1]

        for batch in range(self.run.micro_batches):
            is_last = batch == self.run.micro_batches - 1
            for index, unit in enumerate(units):
                use(index, unit.forward_ms, is_kept=batch > 0 and index == 0)
            for index, unit in reversed(list(enumerate(units))):
                computed = use(index, 2 * unit.forward_ms, is_kept=index == len(units) - 1)
                reductions.append(self.reduce(program, computed, unit.nbytes, is_last))
        return uses[-1], self.update(program, uses[-1])


class DistributedOptimizer(System):
    """Whole parameters and gradients on every rank, optimizer states over all ranks."""

    name, gathers = "distributed optimizer", False

    def reduce(self, program: _Program, computed: _Operation, nbytes: int, is_last: bool) -> None:
        if is_last:
            self._synced.append(program.add("reduce", self.run.flat(nbytes), [computed]))

    def update(self, program: _Program, computed: _Operation) -> list[_Operation]:
        (stepped, *_) = super().update(program, computed)
        return [
            program.add("gather", self.run.flat(unit.nbytes), [stepped]) for unit in self.run.units
        ]

    def node_nbytes(self) -> float:
        if self.run.nodes == 1:
            return 0.0
        return 2 * (self.run.num_ranks - 1) / self.run.num_ranks * self.run.nbytes

    def state_nbytes(self) -> float:
        return self.run.nbytes * (2 + 2 / self.run.num_ranks)


class _MegatronFSDP(System):
    """It keeps a copy of the parameters to update even where they are fp32, and between two steps
    the memory of one layer and the ends as a whole."""

    def _state_nbytes(self, sharing_ranks: int) -> float:
        whole = sum({unit.nbytes for unit in self.run.units})
        return 5 * self.run.nbytes / sharing_ranks + whole


class ZeRO3(_MegatronFSDP):
    """Everything over all ranks."""

    name = "Megatron-FSDP ZeRO-3"

    def gather(self, nbytes: int) -> Work:
        return self.run.flat(nbytes)

    def reduce(
        self, program: _Program, computed: _Operation, nbytes: int, is_last: bool
    ) -> _Operation:
        self._synced.append(program.add("reduce", self.run.flat(nbytes), [computed]))
        return self._synced[-1]

    def node_nbytes(self) -> float:
        if self.run.nodes == 1:
            return 0.0
        ranks, batches, units = self.run.num_ranks, self.run.micro_batches, self.run.units
        # The unit at a turn stays gathered.
        kept = batches * units[-1].nbytes + (batches - 1) * units[0].nbytes
        return (ranks - 1) / ranks * (3 * batches * self.run.nbytes - kept)

    def state_nbytes(self) -> float:
        return self._state_nbytes(self.run.num_ranks)


class _InNode(System):
    """Parameters and gradients over a node: gathers stay inside it, and each of its shards crosses
    to the other nodes twice a step, as gradient and as parameter or sum."""

    def gather(self, nbytes: int) -> Work:
        return self.run.in_node(nbytes)

    def node_nbytes(self) -> float:
        return 2 * (self.run.nodes - 1) / self.run.nodes * self.run.nbytes


class HSDP(_InNode, _MegatronFSDP):
    """Everything over a node, gradients summed over nodes after the last micro-batch."""

    name = "Megatron-FSDP HSDP"

    def reduce(
        self, program: _Program, computed: _Operation, nbytes: int, is_last: bool
    ) -> _Operation:
        reduced = program.add("reduce", self.run.in_node(nbytes), [computed])
        if is_last:
            resource, length_ms = self.run.across_nodes(nbytes)
            self._synced.append(program.add("sum", (resource, 2 * length_ms), [reduced]))
        return reduced

    def state_nbytes(self) -> float:
        return self._state_nbytes(self.run.ranks_per_node)


class AsyncHZP(_InNode):
    """Parameters and gradients over a node, optimizer states over all ranks."""

    name = "AsyncHZP (node, node, world)"

    def reduce(
        self, program: _Program, computed: _Operation, nbytes: int, is_last: bool
    ) -> _Operation:
        reduced = program.add("reduce", self.run.in_node(nbytes), [computed])
        if is_last:
            work = self.run.across_nodes(nbytes)
            self._synced.append(program.add("grad-sync", work, [reduced]))
        return reduced

    def update(self, program: _Program, computed: _Operation) -> list[_Operation]:
        (stepped, *_) = super().update(program, computed)
        return [
            program.add("param-sync", self.run.across_nodes(unit.nbytes), [stepped])
            for unit in self.run.units
        ]

    def state_nbytes(self) -> float:
        node = self.run.ranks_per_node
        units = [
            UnitInFlight(str(index), unit.nbytes, unit.nbytes + unit.nbytes // node, unit.nbytes, 1)
            for index, unit in enumerate(self.run.units)
        ]
        memory = memory_in_flight(units)
        at_rest = self.run.nbytes * (2 / node + 2 / self.run.num_ranks)
        return at_rest + memory.params + memory.grads


SYSTEMS = (DistributedOptimizer, ZeRO3, HSDP, AsyncHZP)
