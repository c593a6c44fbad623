# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Simulates a step on one rank of each pipeline stage: computing, transfers in lanes, waiting."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from megatron_asynchzp.planner.order import StepOrder
from megatron_asynchzp.planner.program import (
    COMPUTE,
    GATHER,
    GRAD_SYNC,
    PARAM_SYNC,
    REDUCE,
    Phase,
    before,
)
from megatron_asynchzp.planner.traffic import BETWEEN, INSIDE, Transfer

LANE_NAMES = {GATHER: "gather", REDUCE: "reduce", GRAD_SYNC: "grad-sync", PARAM_SYNC: "param-sync"}
"""As the engine's timeline calls them."""

_RESOURCES = {INSIDE: 1, BETWEEN: 2}  # of a stage; 0 computes
_PER_STAGE = 3
_NO_RESOURCE = -1

Work = Sequence[Transfer]
"""Of one operation, one after the other."""


@dataclass(frozen=True)
class UnitCost:
    """Cost of a unit on a rank: seconds to compute a micro-batch, and its operations' work."""

    name: str
    forward_s: float
    backward_s: float
    gather: Work = ()
    reduce: Work = ()
    grad_sync: Work = ()
    param_sync: Work = ()

    def work(self, kind: int) -> Work:
        return (self.gather, self.reduce, self.grad_sync, self.param_sync)[kind - GATHER]


@dataclass(frozen=True)
class StageProgram:
    """One rank of a pipeline stage."""

    phases: Sequence[Phase]  # of its step
    order: StepOrder  # of its step
    costs: Sequence[UnitCost]  # of each unit, by number
    optimizer_s: float = 0.0  # the optimizer computes
    host_s: float = 0.0  # of the host before the first unit computes, while parameters are rebuilt


class Interval(NamedTuple):
    """Interval of a step in the engine's timeline, in seconds from the optimizer on."""

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a step."""

    compute_s: float  # with the optimizer and the host's part
    exposed_s: float
    bubble_s: float
    links_s: dict[str, float] = field(default_factory=dict)  # for which each link is busy


@dataclass(frozen=True)
class Step:
    """Result of a simulated step. spans: of each stage, if requested."""

    step_s: float
    stages: tuple[StageTimes, ...]
    spans: tuple[tuple[Interval, ...], ...] = ()

    @property
    def worst(self) -> StageTimes:
        return max(self.stages, key=lambda stage: stage.exposed_s)


class _Link:
    """A link that the operations on it share evenly, as messages of several collectives do.

    served: seconds of service of an operation that was there from the start. waiting: a heap of
    each operation's `served` at its end, and its node.
    """

    __slots__ = ("number", "served", "since", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int]] = []
        self.served = self.since = 0.0
        self.number = 0  # of the end that was planned last

    def advance(self, now: float) -> None:
        if self.waiting:
            self.served += (now - self.since) / len(self.waiting)
        self.since = now

    def plan_end(self) -> tuple[float, int]:
        """Return when the next operation ends if no other comes, and the number of that plan."""
        self.number += 1
        return self.since + (self.waiting[0][0] - self.served) * len(self.waiting), self.number


class _Network:
    """Nodes of work with their predecessors, and when each ran.

    A node occupies its resource for its length, longer on a shared link, and ends after its
    latency. A computing resource runs its nodes one after the other.
    """

    def __init__(self, num_resources: int):
        self.length: list[float] = []
        self.latency: list[float] = []
        self.resource: list[int] = []
        self.waits: list[int] = []
        self.then: list[list[int]] = []
        self.begin: list[float] = []
        self.end: list[float] = []
        self.busy = [0.0] * num_resources

    def add(self, resource: int, length: float, after: Sequence[int], latency: float = 0.0) -> int:
        node = len(self.length)
        self.length.append(length)
        self.latency.append(latency)
        self.resource.append(resource)
        self.waits.append(len(after))
        self.then.append([])
        for index in after:
            self.then[index].append(node)
        return node

    def run(self) -> None:
        count = len(self.length)
        length, latency = self.length, self.latency
        resource, waits, then, busy = self.resource, self.waits, self.then, self.busy
        links = {index: _Link() for index in range(len(busy)) if index % _PER_STAGE}
        self.begin, self.end, ready = [0.0] * count, [0.0] * count, [0.0] * count
        begins, ends = self.begin, self.end
        # Nodes that become ready, with 0, and links, as ~index, with the number of a planned end.
        heap = [(0.0, node, 0) for node in range(count) if waits[node] == 0]
        done = 0
        while heap:
            now, node, number = heappop(heap)
            end = now
            if node >= 0:
                begins[node] = now
                own = resource[node]
                if own >= 0:
                    busy[own] += length[node]
                if (link := links.get(own)) is not None:
                    link.advance(now)
                    heappush(link.waiting, (link.served + length[node], node))
                    planned, number = link.plan_end()
                    heappush(heap, (planned, ~own, number))
                    continue
                end += length[node]
            else:
                link = links[~node]
                if number != link.number:
                    continue  # something came meanwhile
                link.advance(now)
                _, ended = heappop(link.waiting)
                if link.waiting:
                    planned, number = link.plan_end()
                    heappush(heap, (planned, node, number))
                node = ended
            end += latency[node]
            ends[node] = end
            done += 1
            for follower in then[node]:
                if end > ready[follower]:
                    ready[follower] = end
                waits[follower] -= 1
                if waits[follower] == 0:
                    heappush(heap, (ready[follower], follower, 0))
        if done < count:
            raise RuntimeError(f"{count - done} operations of the step wait for each other")


class _StageNodes:
    """The nodes of a stage.

    computing: (action, node, arrival) of each computation, where arrival is the node that receives
    another stage's output.
    """

    def __init__(self, index: int, stage: StageProgram):
        self.index, self.stage = index, stage
        self.prepared = 0  # the node after which the first unit may compute
        self.computing: list[tuple[int, int, int | None]] = []
        self.lanes: list[tuple[int, int, int]] = []  # action, first node, last node
        self.first_of_phase: dict[tuple[bool, int, int], int] = {}
        self.last_of_phase: dict[tuple[bool, int, int], int] = {}
        self.last: list[int] = []

    def resource(self, link: str) -> int:
        return _PER_STAGE * self.index + _RESOURCES[link]

    def build(self, network: _Network, runs_ahead: bool, has_pipeline: bool) -> None:
        stage, add = self.stage, network.add
        actions, phases, costs = stage.order.actions, stage.phases, stage.costs
        computes = _PER_STAGE * self.index
        main = self.prepared = add(computes, stage.optimizer_s, ())
        lane_last = dict.fromkeys(LANE_NAMES, main)
        last = self.last
        work_of = {kind: [cost.work(kind) for cost in costs] for kind in LANE_NAMES}
        links = {link: self.resource(link) for link in _RESOURCES}
        before_phase = -1
        for index, (kind, unit, after, phase_index) in enumerate(actions):
            if kind == COMPUTE:
                if not self.computing and stage.host_s:
                    # Inline, the host first waits for the parameters that are rebuilt.
                    rebuilt = last[-1:] if stage.order.schedule.is_inline else ()
                    main = self.prepared = add(computes, stage.host_s, (main, *rebuilt))
                phase = phases[phase_index]
                deps = [main, *(last[action] for action in after)]
                arrival = None
                if phase_index != before_phase:
                    before_phase = phase_index
                    if has_pipeline:
                        arrival = add(_NO_RESOURCE, 0.0, ())
                        self.first_of_phase[phase[:3]] = arrival
                        deps.append(arrival)
                cost = costs[unit]
                length = cost.forward_s if phase.is_forward else cost.backward_s
                main = add(computes, length, deps)
                self.last_of_phase[phase[:3]] = main
                self.computing.append((index, main, arrival))
                last.append(main)
                continue
            deps = [lane_last[kind], *(last[action] for action in after)]
            if not runs_ahead:
                deps.append(main)
            first = node = -1
            for link, busy_s, latency_s in work_of[kind][unit]:
                node = add(links[link], busy_s, deps if first < 0 else (node,), latency_s)
                first = node if first < 0 else first
            if first < 0:
                first = node = add(_NO_RESOURCE, 0.0, deps)
            lane_last[kind] = node
            last.append(node)
            self.lanes.append((index, first, node))

    def times(self, network: _Network, step_s: float) -> StageTimes:
        begin, end = network.begin, network.end
        compute, bubble = self.stage.optimizer_s + self.stage.host_s, 0.0
        reached = end[self.prepared]
        exposed = reached - compute
        for _, node, arrival in self.computing:
            ready = reached
            if arrival is not None and end[arrival] > reached:
                bubble += end[arrival] - reached
                ready = end[arrival]
            exposed += begin[node] - ready
            compute += network.length[node]
            reached = end[node]
        synced = max([reached, *(end[self.last[action]] for action in self.stage.order.waits)])
        exposed += synced - reached
        busy = {link: network.busy[self.resource(link)] for link in _RESOURCES}
        return StageTimes(compute, exposed, bubble + step_s - synced, busy)

    def finished(self, network: _Network) -> float:
        waits = (network.end[self.last[action]] for action in self.stage.order.waits)
        return max([network.end[node] for _, node, _ in self.computing[-1:]] + list(waits))

    def spans(self, network: _Network, step_s: float) -> tuple[Interval, ...]:
        begin, end, stage = network.begin, network.end, self.stage
        spans = [Interval("capture", "step", 0.0, step_s)]
        if stage.optimizer_s:
            spans.append(Interval("compute", "optimizer", 0.0, stage.optimizer_s))
        reached = end[self.prepared]
        if stage.host_s:
            spans.append(Interval("compute", "host", begin[self.prepared], reached))
        for index, node, arrival in self.computing:
            action = stage.order.actions[index]
            name = stage.costs[action.unit].name
            ready = max(reached, end[arrival]) if arrival is not None else reached
            if begin[node] > ready:
                spans.append(Interval("wait", name, ready, begin[node]))
            is_forward = stage.phases[action.phase].is_forward
            direction = "forward" if is_forward else "backward"
            spans.append(Interval("compute", f"{direction} {name}", begin[node], end[node]))
            reached = end[node]
        synced = max([reached, *(end[self.last[awaited]] for awaited in stage.order.waits)])
        if synced > reached:
            spans.append(Interval("wait", "gradients", reached, synced))
        for index, first, last in self.lanes:
            action = stage.order.actions[index]
            if end[last] > begin[first]:
                name = stage.costs[action.unit].name
                spans.append(Interval(LANE_NAMES[action.kind], name, begin[first], end[last]))
        return tuple(spans)


def simulate(
    stages: Sequence[StageProgram],
    runs_ahead: bool = True,
    send_s: float = 0.0,
    chunks: int = 1,
    with_spans: bool = False,
) -> Step:
    """Simulate a step in the steady state, from an optimizer to the next.

    runs_ahead: see Cluster. send_s: from the end of a phase to the next stage's begin. chunks: per
    rank.
    """
    network = _Network(_PER_STAGE * len(stages))
    parts = [_StageNodes(index, stage) for index, stage in enumerate(stages)]
    has_pipeline = len(stages) > 1 or chunks > 1
    for part in parts:
        part.build(network, runs_ahead, has_pipeline)
    for part in parts:
        for (is_forward, chunk, batch), arrival in part.first_of_phase.items():
            phase = Phase(is_forward, chunk, batch)
            source = before(phase, part.index, len(stages), chunks)
            if source is not None:
                sender = parts[source[0]].last_of_phase[is_forward, source[1], batch]
                network.length[arrival] = send_s if source[0] != part.index else 0.0
                network.waits[arrival] += 1
                network.then[sender].append(arrival)
    network.run()
    step_s = max(part.finished(network) for part in parts)
    spans = tuple(part.spans(network, step_s) for part in parts) if with_spans else ()
    return Step(step_s, tuple(part.times(network, step_s) for part in parts), spans)
