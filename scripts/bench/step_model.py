# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a model of one training step: how long it takes, what leaves a node and what a rank holds,
for four ways to share a model out. Must not know processes: it is arithmetic.

A step is a list of operations. Each belongs to a lane, in whose order it runs, comes after others,
and occupies one resource for its length: the computing of a rank, the link of a node to the
others, or the fabric inside a node. All ranks do the same, so one rank and its node are enough.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from scripts.testbed.profile import NetworkProfile

COMPUTE, INSIDE, BETWEEN = "compute", "inside", "between"
_STEPS = 4  # until one is like the one before
_BYTES = 4  # fp32 parameters, gradients and both moments


@dataclass(frozen=True)
class ModelledRun:
    """layers of `layer_numel` parameters each; layer_ms: forward of one layer and micro-batch on a
    rank, the backward takes twice that; nodes x ranks_per_node on `profile`."""

    profile: NetworkProfile
    nodes: int
    ranks_per_node: int
    layers: int
    layer_numel: int
    layer_ms: float
    micro_batches: int = 1

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def layer_nbytes(self) -> int:
        return _BYTES * self.layer_numel

    @property
    def nbytes(self) -> int:
        """Of all parameters."""
        return self.layers * self.layer_nbytes

    # ---- collectives: (resource, milliseconds) of one layer's all-gather or reduce-scatter

    def in_node(self) -> tuple[str, float]:
        """Over the ranks of a node; its ranks share the fabric."""
        shard = self.layer_nbytes / self.ranks_per_node
        hop = _ms(self.ranks_per_node * shard, self.profile, False)
        return INSIDE, (self.ranks_per_node - 1) * hop

    def across_nodes(self) -> tuple[str, float]:
        """Of what one rank holds of the layer, over the ranks at its place in the other nodes; a
        node's ranks share its link."""
        hop = _ms(self.layer_nbytes / self.nodes, self.profile, True)
        return BETWEEN, (self.nodes - 1) * hop

    def flat(self) -> tuple[str, float]:
        """Over all ranks, one ring that enters and leaves every node once."""
        if self.nodes == 1:
            return self.in_node()
        shard = self.layer_nbytes / self.num_ranks
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
    after: list["_Operation"]
    end_ms: float | None = None


@dataclass
class _Program:
    """What all steps issue, lane by lane."""

    lanes: dict[str, list[_Operation]] = field(default_factory=lambda: defaultdict(list))

    def add(
        self, lane: str, work: tuple[str, float], after: Iterable[_Operation | None] = ()
    ) -> _Operation:
        operation = _Operation(lane, *work, [one for one in after if one is not None])
        self.lanes[lane].append(operation)
        return operation

    def run(self) -> None:
        """Give every operation its end: whoever is ready first gets the resource."""
        free: dict[str, float] = defaultdict(float)
        lane_end: dict[str, float] = defaultdict(float)
        heads = {lane: 0 for lane in self.lanes}
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

    def __init__(self, run: ModelledRun):
        self.run = run

    def step_ms(self) -> float:
        """From the end of one step's computation to that of the next."""
        program, previous, ends = _Program(), None, []
        for _ in range(_STEPS):
            previous = self._add_step(program, previous)
            ends.append(previous["end"])
        program.run()
        return ends[-1].end_ms - ends[-2].end_ms

    def node_nbytes(self) -> float:
        """Bytes that leave a node in a step."""
        raise NotImplementedError

    def state_nbytes(self) -> float:
        """Bytes that the fullest rank holds between two steps, fixed buffers included."""
        raise NotImplementedError

    # ---- what differs

    gathers = True
    """Whether each use of a layer gathers it."""

    def gather(self) -> tuple[str, float]:
        raise NotImplementedError

    def reduce(self, program: _Program, computed: _Operation, is_last: bool) -> _Operation | None:
        """What follows the backward of a layer; returns what its slot waits for."""
        raise NotImplementedError

    def update(self, program: _Program, computed: _Operation) -> list[_Operation]:
        """After the last backward: for each layer what its next use waits for."""
        raise NotImplementedError

    # ---- what does not

    def _add_step(self, program: _Program, previous: dict | None) -> dict:
        layers, forward = self.run.layers, (COMPUTE, self.run.layer_ms)
        backward = (COMPUTE, 2 * self.run.layer_ms)
        updated = previous["updated"] if previous else [None] * layers
        uses: list[_Operation] = []
        reductions: list[_Operation | None] = []
        self._synced: list[_Operation] = []

        def use(layer: int, work: tuple[str, float], is_kept: bool) -> _Operation:
            after: list[_Operation | None] = [updated[layer]]
            if self.gathers and not is_kept:
                # Two slots: the layer before the one before must have been computed with.
                last = uses[-2] if len(uses) > 1 else None
                after = [program.add("gather", self.gather(), [updated[layer], last])]
            if len(reductions) > 1:
                after.append(reductions[-2])  # two slots for gradients
            uses.append(program.add("main", work, after))
            return uses[-1]

        for batch in range(self.run.micro_batches):
            for layer in range(layers):
                use(layer, forward, is_kept=batch > 0 and layer == 0)
            for layer in reversed(range(layers)):
                computed = use(layer, backward, is_kept=layer == layers - 1)
                is_last = batch == self.run.micro_batches - 1
                reductions.append(self.reduce(program, computed, is_last))
        return {"updated": self.update(program, uses[-1]), "end": uses[-1]}


class AsyncHZP(System):
    """Parameters and gradients over a node, optimizer states over all ranks."""

    name = "AsyncHZP"

    def gather(self) -> tuple[str, float]:
        return self.run.in_node()

    def reduce(self, program: _Program, computed: _Operation, is_last: bool) -> _Operation:
        reduced = program.add("reduce", self.run.in_node(), [computed])
        if is_last:
            self._synced.append(program.add("grad-sync", self.run.across_nodes(), [reduced]))
        return reduced

    def update(self, program: _Program, computed: _Operation) -> list[_Operation]:
        stepped = program.add("main", (COMPUTE, 0.0), [computed, *self._synced])
        return [
            program.add("param-sync", self.run.across_nodes(), [stepped])
            for _ in range(self.run.layers)
        ]

    def node_nbytes(self) -> float:
        return 2 * (self.run.nodes - 1) / self.run.nodes * self.run.nbytes

    def state_nbytes(self) -> float:
        in_node, layer = self.run.ranks_per_node, self.run.layer_nbytes
        rings = 2 * layer + 2 * (layer + layer / in_node)
        return self.run.nbytes * (2 / in_node + 2 / self.run.num_ranks) + rings


class HSDP(System):
    """Everything over a node, gradients summed over nodes after each reduction."""

    name = "HSDP"

    def gather(self) -> tuple[str, float]:
        return self.run.in_node()

    def reduce(self, program: _Program, computed: _Operation, is_last: bool) -> _Operation:
        reduced = program.add("reduce", self.run.in_node(), [computed])
        if is_last:
            resource, length_ms = self.run.across_nodes()
            self._synced.append(program.add("sum", (resource, 2 * length_ms), [reduced]))
        return reduced

    def update(self, program: _Program, computed: _Operation) -> list[_Operation]:
        stepped = program.add("main", (COMPUTE, 0.0), [computed, *self._synced])
        return [stepped] * self.run.layers

    def node_nbytes(self) -> float:
        return 2 * (self.run.nodes - 1) / self.run.nodes * self.run.nbytes

    def state_nbytes(self) -> float:
        return 4 * self.run.nbytes / self.run.ranks_per_node + 4 * self.run.layer_nbytes


class ZeRO3(System):
    """Everything over all ranks."""

    name = "ZeRO-3"

    def gather(self) -> tuple[str, float]:
        return self.run.flat()

    def reduce(self, program: _Program, computed: _Operation, is_last: bool) -> _Operation:
        self._synced.append(program.add("reduce", self.run.flat(), [computed]))
        return self._synced[-1]

    def update(self, program: _Program, computed: _Operation) -> list[_Operation]:
        stepped = program.add("main", (COMPUTE, 0.0), [computed, *self._synced])
        return [stepped] * self.run.layers

    def node_nbytes(self) -> float:
        if self.run.nodes == 1:
            return 0.0
        ranks = self.run.num_ranks
        return 3 * self.run.micro_batches * (ranks - 1) / ranks * self.run.nbytes

    def state_nbytes(self) -> float:
        return 4 * self.run.nbytes / self.run.num_ranks + 4 * self.run.layer_nbytes


class DistributedOptimizer(System):
    """Whole parameters and gradients on every rank, optimizer states over all ranks."""

    name, gathers = "distributed optimizer", False

    def reduce(self, program: _Program, computed: _Operation, is_last: bool) -> None:
        if is_last:
            self._synced.append(program.add("reduce", self.run.flat(), [computed]))

    def update(self, program: _Program, computed: _Operation) -> list[_Operation]:
        stepped = program.add("main", (COMPUTE, 0.0), [computed, *self._synced])
        return [
            program.add("gather", self.run.flat(), [stepped]) for _ in range(self.run.layers)
        ]

    def node_nbytes(self) -> float:
        if self.run.nodes == 1:
            return 0.0
        return 2 * (self.run.num_ranks - 1) / self.run.num_ranks * self.run.nbytes

    def state_nbytes(self) -> float:
        return self.run.nbytes * (2 + 2 / self.run.num_ranks)


SYSTEMS = (DistributedOptimizer, ZeRO3, HSDP, AsyncHZP)
