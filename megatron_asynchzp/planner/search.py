# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the choice of a plan: which of the possible ones fit, and which is fastest."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner.contenders import (
    CONTENDERS,
    DISTRIBUTED_OPTIMIZER,
    FSDP2,
    FSDP2_HSDP,
    PLAIN_DATA_PARALLELISM,
    Contender,
)
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.program import GATHER, GRAD_SYNC, PARAM_SYNC, REDUCE
from megatron_asynchzp.planner.simulate import Step
from megatron_asynchzp.planner.space import Space, all_divisors, plans, shard_divisors

PLAIN = 0.005
"""A plan whose sizes have a name (ZeRO-3, ...) is preferred to one that is faster by less."""
LIGHT = 1.25
"""Of plans that differ by less than PLAIN, one is chosen that sends at most this many times the
least of them off a node: the planner does not know who else uses the network."""
RESERVE = 0.5
"""The part of a step for which a plain plan's links may be busy where the fastest plan's are less:
what the planner does not know of, such as switches of many nodes, finds some room then."""
FLAT = ("ZeRO-3", "distributed optimizer", "plain data parallelism")
_SCHEMES = {
    "ZeRO-3": FSDP2,
    "distributed optimizer": DISTRIBUTED_OPTIMIZER,
    "plain data parallelism": PLAIN_DATA_PARALLELISM,
    "HSDP": FSDP2_HSDP,
}
_EQUAL = 0.001  # steps that differ by less count as equal: then what sends and holds less is better
_SIMULATED = 40


@dataclass(frozen=True)
class Candidate:
    """A plan with its costs. step: None before the simulation."""

    costing: Costing
    step: Step | None = None

    @property
    def plan(self) -> Plan:
        return self.costing.plan

    @property
    def step_s(self) -> float:
        assert self.step is not None
        return self.step.step_s

    @property
    def busiest_link(self) -> float:
        assert self.step is not None
        busy = (seconds for stage in self.step.stages for seconds in stage.links_s.values())
        return max(busy, default=0.0) / self.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.costing.tokens / self.step_s

    @cached_property
    def scheme(self) -> str:
        return next((name for name, system in _SCHEMES.items() if self.is_of(system)), "")

    def is_of(self, contender: Contender) -> bool:
        sizes = self.plan.sizes
        numbers = contender.numbers(self.costing.dense_ranks, self.ranks_in_node)
        return (sizes.param, sizes.grad, sizes.optim) == numbers

    @property
    def ranks_in_node(self) -> int:
        tp = self.plan.parallel.tp
        per_node = max(1, self.costing.cluster.ranks_per_domain // tp)
        return min(per_node, self.costing.dense_ranks)


def _neighbours(best: Candidate, kept: Mapping[str, int]) -> Iterator[Plan]:
    """Yield plans with another size of a state, from those that `shard_divisors` omits."""
    ranks, in_node = best.costing.dense_ranks, best.ranks_in_node
    tried = shard_divisors(ranks, in_node)
    left_out = [size for size in all_divisors(ranks, in_node) if size not in tried]
    for state in ("param", "grad", "optim"):
        for size in left_out if state not in kept else ():
            sizes = replace(best.plan.sizes, cuts=(), **{state: size})
            try:
                sizes.check(ranks)
            except ConfigurationError:
                continue
            yield replace(best.plan, sizes=sizes.with_short_axes(in_node))


# ---- which of them


@dataclass(frozen=True)
class Outcome:
    """The result of a search."""

    ranked: tuple[Candidate, ...]  # simulated plans that fit, best first
    baselines: dict[str, Candidate | None]  # the fastest plan of each scheme, None if none fits
    num_plans: int
    num_fitting: int
    num_simulated: int
    # the fastest fitting plan with the sizes and schedule of each system
    contenders: dict[Contender, Candidate | None] = field(default_factory=dict)
    smallest: Candidate | None = None  # the plan with the least memory, if nothing fits
    # a plan that may be faster and does not fit, with a lower bound of its step in seconds
    out_of_memory: tuple[Candidate, float] | None = None

    @property
    def best(self) -> Candidate | None:
        """The plan among those as good as the fastest that sends little off a node."""
        # Another system's plan wins if its links are no busier than the fastest plan's; otherwise
        # the fastest of them wins.
        if not self.ranked:
            return None
        fastest = self.ranked[0]
        busiest = max(RESERVE, fastest.busiest_link)
        as_good = [it for it in self.ranked if it.step_s <= (1 + PLAIN) * fastest.step_s]
        least = min(it.costing.node_nbytes for it in as_good)
        light = [it for it in as_good if it.costing.node_nbytes <= LIGHT * least]
        plain = (it for it in light if it.scheme in FLAT and it.busiest_link <= busiest)
        return next(plain, light[0])


def _bounds_of(costing: Costing) -> tuple[float, float]:
    """Return a lower bound of a step and an estimate, in seconds; plans share the parts of both."""
    # A step is no shorter than what a rank computes, and than what each link and each lane carries.
    plan = costing.plan
    parallel, schedule, count = plan.parallel, plan.schedule, plan.batch.num_micro_batches
    compute, fill = costing.once(
        ("computing", parallel, plan.batch, plan.recompute), lambda: _computing_s(costing)
    )
    carried = costing.once(
        ("carried", parallel, plan.sizes, plan.wire, schedule),
        lambda: [times for stage in range(parallel.pp) for times in _carried(costing, stage)],
    )
    busy = max(count * each + ahead for each, ahead in zip(compute, fill, strict=True))
    worst = max((count * each + once for each, once, _ in carried), default=0.0)
    least = max((count * (each - kept) + once for each, once, kept in carried), default=0.0)
    ends = max((once for _, once, _ in carried), default=0.0)
    # What a step carries once is hidden behind one backward and one forward at best; of the
    # rest the first unit and the last wait.
    hidden = max(worst, busy + max(0.0, ends - max(compute)))
    return max(busy, least), hidden + 0.02 * worst / count


def _computing_s(costing: Costing) -> tuple[list[float], list[float]]:
    """Return each stage's seconds per micro-batch, and those of earlier stages' first chunks."""
    # A stage begins after the forward of these chunks, and ends before their last backward.
    of_unit = costing.compute.of_unit
    stages = [[(unit.chunk, sum(of_unit(unit))) for unit in units] for units in costing.units]
    first = [sum(seconds for chunk, seconds in units if chunk == 0) for units in stages]
    each = [sum(seconds for _, seconds in units) for units in stages]
    return each, [sum(first[:stage]) for stage in range(len(stages))]


def _carried(costing: Costing, stage: int) -> list[tuple[float, float, float]]:
    """Return each link's and lane's seconds per micro-batch and per step, and those it may save.

    A lane's operations and latencies follow each other. Units that are in memory when a forward or
    a backward ends need not be gathered for the next, which saves a micro-batch at most the gathers
    of all units that fit into memory together.
    """
    schedule = costing.plan.schedule
    # With a budget, a unit may be gathered or reduced only once in a step.
    times = {
        GATHER: (0, 1) if schedule.keep_params_nbytes else (2, 0),
        REDUCE: (0, 1) if schedule.keep_grads_nbytes else (1, 0),
        GRAD_SYNC: (0, 1),
        PARAM_SYNC: (0, 1),
    }
    each, once = defaultdict[str | int, float](float), defaultdict[str | int, float](float)
    gathers = defaultdict[tuple[str | int, int], list[tuple[float, int]]](list)
    for unit, cost in zip(costing.units[stage], costing.communication(stage), strict=True):
        for lane, (often, rarely) in times.items():
            own = defaultdict[str | int, float](float)
            for link, busy_s, latency_s in cost[lane]:
                own[link] += busy_s
                own[lane] += busy_s + latency_s
            for carrier, seconds in own.items():
                each[carrier] += often * seconds
                once[carrier] += rarely * seconds
                if lane == GATHER and often:
                    gathers[carrier, unit.chunk].append((seconds, costing.in_flight(unit).params))
    kept = defaultdict[str | int, float](float)
    rooms = {unit.chunk: None for unit in costing.units[stage] if unit.numel}
    for chunk, memory in zip(rooms, costing.in_flight_of(stage), strict=True):
        for carrier in each:
            kept[carrier] += 2 * _most_of(gathers[carrier, chunk], memory.params)
    return [(each[carrier], once[carrier], kept[carrier]) for carrier in each]


def _most_of(gathers: Sequence[tuple[float, int]], room: float) -> float:
    """Return the most seconds of gathers whose bytes fit into `room` together, parts included."""
    total = 0.0
    for seconds, nbytes in sorted(gathers, key=lambda it: it[0] / max(1, it[1]), reverse=True):
        part = min(1.0, room / max(1, nbytes))
        total += part * seconds
        room -= part * nbytes
    return total


Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and out of how many."""


def search(space: Space, progress: Progress = lambda *_: None) -> Outcome:
    """Bound every plan's step, and simulate promising ones; refuse a budget too small for all."""
    rated: list[tuple[float, float, Costing]] = []
    too_large: list[tuple[float, Costing]] = []
    smallest: Costing | None = None
    every, refused = list(plans(space)), []
    for done, plan in enumerate(every):
        if done % 200 == 0:
            progress("plans", done, len(every))
        costing = space.costing(plan)
        if not costing.has_room:
            refused.append(costing)
            continue
        bound, estimate = _bounds_of(costing)
        if smallest is None or costing.memory.total < smallest.memory.total:
            smallest = costing
        if costing.fits:
            rated.append((estimate, bound, costing))
        else:
            too_large.append((bound, costing))
    progress("plans", len(every), len(every))
    if refused and len(refused) == len(every):
        _ = min(refused, key=lambda rating: rating.least_in_flight).memory  # raises
    rated.sort(key=lambda rating: (rating[0], rating[2].memory.total))
    chosen = _promising(rated)
    simulated: list[Candidate] = []
    for done, costing in enumerate(chosen):
        progress("simulations", done, len(chosen))
        simulated.append(Candidate(costing, costing.step()))
    progress("simulations", len(chosen), len(chosen))
    ranked = _ranked(simulated)
    # Of many divisors the first pass tries a few; those between them are tried around the best.
    around, num_fitting = None, len(rated)
    while ranked and ranked[0] is not around:
        around = ranked[0]
        for plan in _neighbours(around, space.kept_sizes):
            if plan in every:
                continue
            every.append(plan)
            costing = space.costing(plan)
            if costing.has_room and costing.fits:
                num_fitting += 1
                simulated.append(Candidate(costing, costing.step()))
        ranked = _ranked(simulated)
    names = ("ZeRO-3", "HSDP", "distributed optimizer")
    return Outcome(
        tuple(ranked),
        {name: next((it for it in ranked if it.scheme == name), None) for name in names},
        len(every),
        num_fitting,
        len(simulated),
        _contenders(ranked),
        Candidate(smallest) if smallest is not None else None,
        _missed(too_large, ranked),
    )


def _promising(rated: Sequence[tuple[float, float, Costing]]) -> list[Costing]:
    """Return the first ones, and the two best of every scheme that other systems have."""
    chosen = [costing for _, _, costing in rated[:_SIMULATED]]
    of_scheme: dict[str, int] = {}
    for _, _, costing in rated:
        candidate = Candidate(costing)
        name = candidate.scheme or next(
            (contender.name for contender in CONTENDERS if candidate.is_of(contender)), ""
        )
        of_scheme[name] = of_scheme.get(name, 0) + 1
        if name and of_scheme[name] <= 2 and costing not in chosen:
            chosen.append(costing)
    return chosen


def _contenders(ranked: Sequence[Candidate]) -> dict[Contender, Candidate | None]:
    """Plan each contender with the batch and recomputation best with its sizes in our schedule."""
    plans: dict[Contender, Candidate | None] = {}
    for contender in CONTENDERS:
        like = next((candidate for candidate in ranked if candidate.is_of(contender)), None)
        is_one_node = ranked and ranked[0].ranks_in_node == ranked[0].costing.dense_ranks
        if contender.needs_nodes and is_one_node:
            continue  # there it is FSDP2
        if like is not None:
            costing = replace(like.costing, plan=contender.plan(like.plan), known={})
            like = Candidate(costing, costing.step())
        plans[contender] = like
    return plans


def _ranked(simulated: Iterable[Candidate]) -> list[Candidate]:
    rest = sorted(simulated, key=lambda candidate: candidate.step_s)
    ranked: list[Candidate] = []
    while rest:
        limit = (1 + _EQUAL) * rest[0].step_s
        equal = [candidate for candidate in rest if candidate.step_s <= limit]
        equal.sort(key=lambda it: (it.costing.node_nbytes, it.costing.memory.total))
        ranked += equal
        rest = rest[len(equal) :]
    best_depth: dict[object, Candidate] = {}
    for candidate in ranked:
        plan = candidate.plan
        best_depth.setdefault((plan.sizes, plan.parallel, plan.batch, plan.recompute), candidate)
    return list(best_depth.values())


def _missed(
    too_large: Sequence[tuple[float, Costing]], ranked: Sequence[Candidate]
) -> tuple[Candidate, float] | None:
    if not ranked:
        return None
    faster = [bounded for bounded in too_large if bounded[0] < (1 - PLAIN) * ranked[0].step_s]
    if not faster:
        return None
    bound, costing = min(faster, key=lambda bounded: bounded[1].memory.total)
    return Candidate(costing), bound
