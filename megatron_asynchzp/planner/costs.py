# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Time and traffic of a step of a plan on a cluster: from units to simulated stages to a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megatron_asynchzp.engine.sharding.in_flight import FP32_NBYTES, UnitInFlight
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.compute import ComputeTimes
from megatron_asynchzp.planner.held import IN_FP8, RankBytes
from megatron_asynchzp.planner.model import Unit
from megatron_asynchzp.planner.order import StepOrder
from megatron_asynchzp.planner.program import (
    GATHER,
    GRAD_SYNC,
    PARAM_SYNC,
    REDUCE,
    OrderUnit,
    Phase,
    Visit,
    stage_phases,
)
from megatron_asynchzp.planner.simulate import StageProgram, StageTimes, Step, UnitCost, simulate
from megatron_asynchzp.planner.traffic import (
    Collective,
    Transfer,
    step_traffic,
    transfers,
    unit_collectives,
)

# Bytes that the optimizer's kernels move for an element: gradient twice (norm, update), main
# parameter and both moments read and written, the model's copy written.
_OPTIMIZER_NBYTES = 8 + 3 * 8 + 2
_ZEROED_NBYTES = 4  # for an element of the gradient shard
_FOLDED = 3, 4  # micro-batches of each stage, from which longer steps are extrapolated


@dataclass(frozen=True)
class Costing(RankBytes):
    """Bytes and seconds of a plan for a model on a cluster."""

    # ---- stages

    def order_unit(self, unit: Unit, is_tied: bool) -> OrderUnit:
        sizes = self.groups[unit.group].sizes
        if unit.numel == 0:  # the output layer with the embedding's weight
            nothing = UnitInFlight(unit.name, 0, 0, 0, 1)
            return OrderUnit(None, nothing, False, False, False)
        is_trained = unit.is_trained
        at_end = unit.kind == "root" or (is_tied and unit.kind == "embedding")
        size = (self.padded(unit), unit.group)
        return OrderUnit(
            size,
            self.in_flight(unit),
            sizes.param > 1,
            is_trained and sizes.grad > 1,
            is_trained,
            reduces_at_end=at_end,
            sum_nbytes=FP32_NBYTES * self.padded(unit) * is_trained,
            traffic=self._outer_traffic(unit),
            may_be_early=self._may_be_early(unit),
        )

    def order(self, stage: int, phases: Sequence[Phase]) -> StepOrder:
        units = self.units[stage]
        is_tied = any(unit.kind == "output" and unit.numel == 0 for unit in units)
        order_units = [self.order_unit(unit, is_tied) for unit in units]
        chunks = range(self.plan.parallel.virtual)
        visits = [chunk_visits(units, chunk, is_tied) for chunk in chunks]
        return StepOrder(order_units, visits, phases, self.plan.schedule, self.plan.overlaps_params)

    def phases(self, stage: int, micro_batches: int) -> list[Phase]:
        parallel = self.plan.parallel
        return stage_phases(stage, parallel.pp, parallel.virtual, micro_batches)

    @cached_property
    def compute(self) -> ComputeTimes:
        plan = self.plan
        return ComputeTimes(self.model, plan.parallel, plan.batch, plan.recompute, self.cluster)

    @cached_property
    def _costs(self) -> tuple[tuple[UnitCost, ...], ...]:
        return tuple(tuple(map(self._unit_cost, units)) for units in self.units)

    def _unit_cost(self, unit: Unit) -> UnitCost:
        forward_s, backward_s = self.compute.of_unit(unit)
        lanes = (self.work(kind, unit) for kind in (GATHER, REDUCE, GRAD_SYNC, PARAM_SYNC))
        return UnitCost(unit.name, forward_s, backward_s, *lanes)

    def with_sizes(self, sizes: ShardSizes) -> "Costing":
        """Return the costing of the same plan with other sizes, without a shared cache."""
        return replace(self, plan=replace(self.plan, sizes=sizes), known={})

    def work(self, kind: int, unit: Unit) -> list[Transfer]:
        if unit.numel == 0 or not (unit.is_trained or kind == GATHER):
            return []
        return transfers(self.collectives(kind, unit), self.groups[unit.group], self.cluster)

    def collectives(self, kind: int, unit: Unit) -> list[Collective]:
        wire, group = self.plan.wire, self.groups[unit.group]
        in_codes = unit.matrix_numel if wire.code_nbytes and unit.kind in IN_FP8 else 0
        if in_codes and wire.has_directions:  # layers that keep copies read both in forward
            in_codes -= self._quantised_numel(unit)

        def issued(kind: int) -> list[Collective]:
            return unit_collectives(kind, self.padded(unit), self.model.itemsize, group, in_codes)

        if self.plan.sums_each and group.sizes.grad > 1 and kind in (REDUCE, GRAD_SYNC):
            return issued(REDUCE) + issued(GRAD_SYNC) if kind == REDUCE else []
        return issued(kind)

    def communication(self, stage: int) -> list[dict[int, list[Transfer]]]:
        kinds = (GATHER, REDUCE, GRAD_SYNC, PARAM_SYNC)
        units = self.units[stage]
        keys = [(unit.aligned_numel, unit.group, unit.kind, unit.is_trained) for unit in units]
        unit_of = dict(zip(keys, units, strict=True))
        known = {key: {it: self.work(it, unit_of[key]) for it in kinds} for key in unit_of}
        return [known[key] for key in keys]

    def optimizer_s(self, stage: int) -> float:
        nbytes = 0.0
        for unit in filter(lambda unit: unit.is_trained, self.units[stage]):
            sizes, numel = self.groups[unit.group].sizes, self.padded(unit) if unit.numel else 0
            nbytes += _OPTIMIZER_NBYTES * numel / sizes.optim + _ZEROED_NBYTES * numel / sizes.grad
        return nbytes / (1e9 * self.cluster.device.memory_gb_s)

    @cached_property
    def _stages(self) -> dict[int, list[StageProgram]]:
        return {}

    def stages(self, micro_batches: int) -> list[StageProgram]:
        if micro_batches in self._stages:
            return self._stages[micro_batches]
        stages = self._stages[micro_batches] = []
        for index in range(self.plan.parallel.pp):
            phases = self.phases(index, micro_batches)
            order = self.order(index, phases)
            times = self.optimizer_s(index), 1e-6 * self.cluster.device.step_us
            stages.append(StageProgram(phases, order, self._costs[index], *times))
        return stages

    # ---- results

    def simulate(self, micro_batches: int, with_spans: bool = False) -> Step:
        return simulate(
            self.stages(micro_batches),
            self.cluster.runs_ahead,
            self.compute.send_s,
            self.plan.parallel.virtual,
            with_spans,
        )

    def step(self) -> Step:
        return self._of_step(self.simulate, _extrapolated_step)

    def _of_step[Value](
        self, of: Callable[[int], Value], extrapolated: Callable[[Value, Value, float], Value]
    ) -> Value:
        """Return `of` the micro-batches of a step, extrapolated if there are many."""
        # In the steady state each micro-batch is as the one before.
        micro_batches, stages = self.plan.batch.num_micro_batches, self.plan.parallel.pp
        few, more = (count * stages for count in _FOLDED)
        if micro_batches <= more:
            return of(micro_batches)
        return extrapolated(of(few), of(more), (micro_batches - more) / (more - few))

    @cached_property
    def node_nbytes(self) -> float:
        """Bytes of the three states that leave the node with most traffic in a step."""
        stages = range(self.plan.parallel.pp)
        return max(self._of_step(partial(self._left, stage), _extrapolate) for stage in stages)

    def _left(self, stage: int, micro_batches: int) -> float:
        units = self.units[stage]
        groups = [self.groups[unit.group] for unit in units]
        actions = self.stages(micro_batches)[stage].order.actions
        actions = [action for action in actions if units[action.unit].numel]

        def issued(kind: int, index: int) -> list[Collective]:
            return self.collectives(kind, units[index])

        return step_traffic(actions, issued, groups, self.cluster).node_nbytes

    @cached_property
    def model_flops(self) -> float:
        parallel, batch = self.plan.parallel, self.plan.batch
        of_rank = sum(
            unit.flops + self.compute.backward_flops(unit) for units in self.units for unit in units
        )
        return of_rank * self.cluster.num_ranks / parallel.pp * batch.num_micro_batches

    @property
    def tokens(self) -> int:
        parallel, batch = self.plan.parallel, self.plan.batch
        replicas = self.cluster.num_ranks // (parallel.tp * parallel.cp * parallel.pp)
        return batch.tokens * batch.num_micro_batches * replicas

    def mfu(self, step_s: float) -> float:
        peak = 1e12 * self.cluster.device.tflops * self.cluster.num_ranks
        return self.model_flops / (step_s * peak)


def chunk_visits(units: Sequence[Unit], chunk: int, is_tied: bool) -> list[Visit]:
    """Return the calls of a forward through a model chunk."""
    # The root is around everything, experts and adapters are within their layer, tied words within
    # the embedding and again within the output layer.
    visits: list[Visit] = []
    root = embedding = None
    for index, unit in enumerate(units):
        if unit.kind == "embedding":
            embedding = index
        if unit.chunk != chunk:
            continue
        if unit.kind == "root":
            root = index
        elif unit.kind == "positions":  # around the words
            visits[-1] = Visit(index, (visits[-1],))
        elif unit.kind in ("experts", "adapters"):
            visits[-1] = Visit(visits[-1].unit, (*visits[-1].inner, Visit(index)))
        elif unit.kind == "output" and is_tied and embedding is not None:
            visits.append(Visit(index, (Visit(embedding),)))
        else:
            visits.append(Visit(index))
    return visits if root is None else [Visit(root, tuple(visits))]


def _extrapolate(before: float, after: float, times: float) -> float:
    return after + (after - before) * times


def _extrapolated_step(before: Step, after: Step, times: float) -> Step:
    stages = zip(before.stages, after.stages, strict=True)
    return Step(
        _extrapolate(before.step_s, after.step_s, times),
        tuple(_extrapolated(*pair, times) for pair in stages),
    )


def _extrapolated(before: StageTimes, after: StageTimes, times: float) -> StageTimes:
    was, now = before.links_s, after.links_s
    names = ("compute_s", "exposed_s", "bubble_s")
    seconds = ((getattr(before, name), getattr(after, name)) for name in names)
    links = {link: _extrapolate(was[link], now[link], times) for link in now}
    compute_s, exposed_s, bubble_s = (_extrapolate(*pair, times) for pair in seconds)
    return StageTimes(compute_s, exposed_s, bubble_s, links)
