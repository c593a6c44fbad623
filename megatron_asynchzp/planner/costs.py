# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a plan costs on a cluster: from a model, parallel sizes and shard sizes to the stages
that the simulation runs, to a step's time, and to its traffic.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron_asynchzp.planner import model as shapes
from megatron_asynchzp.planner.activations import FUSED, Kernels, Recompute, Setting
from megatron_asynchzp.planner.cluster import MIB, Cluster
from megatron_asynchzp.planner.compute import ComputeTimes
from megatron_asynchzp.planner.memory import (
    Copies,
    Memory,
    MomentBytes,
    stage_activations,
    state_nbytes,
)
from megatron_asynchzp.planner.model import Batch, GroupKey, Model, Parallel, Unit
from megatron_asynchzp.planner.order import StepOrder
from megatron_asynchzp.planner.pipeline import stage_phases
from megatron_asynchzp.planner.program import (
    GATHER,
    GRAD_SYNC,
    PARAM_SYNC,
    REDUCE,
    OrderUnit,
    Phase,
    Visit,
)
from megatron_asynchzp.planner.simulate import Stage, StageTimes, Step, UnitCost, simulate
from megatron_asynchzp.planner.traffic import (
    Collective,
    Group,
    Transfer,
    Wire,
    grad_piece_numels,
    step_traffic,
    transfers,
    unit_collectives,
)
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.backward_room import OuterTraffic, preview_nbytes
from megatron_asynchzp.sharding.in_flight import (
    FP32_NBYTES,
    MemoryInFlight,
    UnitInFlight,
    grads_before_added_nbytes,
    least_in_flight,
    memory_in_flight,
)
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology

# Bytes that the optimizer's kernels move for each element that a rank owns: gradient twice (norm,
# update), main parameter and both moments read and written, the model's copy written.
_OPTIMIZER_NBYTES = 8 + 3 * 8 + 2
_ZEROED_NBYTES = 4  # for each element of the gradient shard
_FOLDED = 3, 4  # micro-batches of each stage, between which a step is extrapolated


# Units whose weights layers of Transformer Engine have.
_IN_FP8 = ("layer", "experts", "mtp")


@dataclass(frozen=True)
class Plan:
    """Everything that a search chooses, and what it leaves as it is.

    sizes: of the dense sharding group.
    expert_sizes: of the experts', None as the engine restricts `sizes` to their group.
    overlaps_params: whether a step begins before all parameter shards are rebuilt, as the engine's
        does.
    is_on_cpu: whether a rank is a process of the CPU platform.
    has_loss_scale: whether gradients carry one, as in fp16.
    seated: kinds of units that CUDA graphs read, which then have seats.
    main_grad: bytes of an element of main gradients.
    """

    sizes: ShardSizes
    parallel: Parallel
    batch: Batch
    schedule: ScheduleConfig = ScheduleConfig()
    recompute: Recompute = Recompute()
    wire: Wire = Wire()
    moments: MomentBytes = MomentBytes()
    expert_sizes: ShardSizes | None = None
    overlaps_params: bool = True
    has_loss_scale: bool = False
    is_on_cpu: bool = False
    seated: tuple[str, ...] = ()
    main_grad: int = FP32_NBYTES


@dataclass(frozen=True)
class Costing:
    """A plan for a model on a cluster.

    known: parts that other plans for the same model, cluster and kernels share, to compute once.

    Raises ValueError where the ranks, layers or micro-batches do not divide.
    """

    model: Model
    plan: Plan
    cluster: Cluster
    kernels: Kernels = FUSED
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        parallel, ranks = self.plan.parallel, self.cluster.num_ranks
        for product, what in (
            (parallel.tp * parallel.cp * parallel.pp, "tensor x context x pipeline"),
            (parallel.experts_tp * parallel.ep * parallel.pp, "expert x pipeline"),
        ):
            if ranks % product:
                raise ValueError(f"{what} parallel size {product} does not divide {ranks} ranks")
        self.plan.sizes.check(self.dense_ranks)

    def _once[Value](self, key: object, make: Callable[[], Value]) -> Value:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    @property
    def setting(self) -> Setting:
        """What activations depend on."""
        plan = self.plan
        return Setting(self.model, plan.parallel, plan.batch, self.kernels, plan.recompute)

    # ---- groups

    @property
    def dense_ranks(self) -> int:
        parallel = self.plan.parallel
        return self.cluster.num_ranks // (parallel.tp * parallel.pp)

    @cached_property
    def groups(self) -> dict[GroupKey, Group]:
        """By the key of a unit's sharding group."""
        parallel, plan = self.plan.parallel, self.plan
        distance = parallel.experts_tp * parallel.ep
        expert_ranks = self.cluster.num_ranks // (distance * parallel.pp)
        expert_sizes = plan.expert_sizes or plan.sizes.restricted_to(expert_ranks)
        slot = plan.schedule.grad_slot_nbytes
        return {
            "dense": Group(self.dense_ranks, plan.sizes, parallel.tp, plan.wire, slot),
            "expert": Group(expert_ranks, expert_sizes, distance, plan.wire, slot),
        }

    # ---- stages

    @cached_property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        """Of each stage."""
        model, plan = self.model, self.plan

        def make() -> tuple[tuple[Unit, ...], ...]:
            return tuple(
                shapes.stage_units(model, plan.parallel, plan.batch, stage)
                for stage in range(plan.parallel.pp)
            )

        return self._once(("units", plan.parallel, plan.batch), make)

    def padded(self, unit: Unit) -> int:
        return self.groups[unit.group].padded(unit.aligned_numel)

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

    def _outer_traffic(self, unit: Unit) -> OuterTraffic:
        group, wire = self.groups[unit.group], self.plan.wire
        numel = self.padded(unit) if unit.numel else 0
        itemsizes = self.model.itemsize, wire.grad_itemsize if wire.is_exchanged else FP32_NBYTES
        return OuterTraffic.of(numel, *itemsizes, group.sizes, group.ranks)

    def _may_be_early(self, unit: Unit) -> bool:
        """Pipeline stages sum gradients of tied embeddings after backward."""
        return self.plan.parallel.pp == 1 or unit.kind not in ("embedding", "output")

    def in_flight(self, unit: Unit) -> UnitInFlight:
        """What the unit needs beside its states, by the engine's own formula."""
        group, itemsize = self.groups[unit.group], self.model.itemsize
        padded = self.padded(unit)
        adds_as_they_come = group.sizes.grad == 1
        numels = tuple(unit.numels.items()) if adds_as_they_come else ()
        key = ("in flight", padded, group, numels, unit.is_trained)

        def make() -> UnitInFlight:
            # Of the mesh only the axes within the gradient shard count.
            world = group.sizes.optim
            topology = ShardTopology(world, 0, group.sizes)
            need = UnitInFlight.of(
                "",
                padded,
                itemsize,
                unit.is_trained,
                topology,
                group.grad_slot_nbytes,
                group.wire.grad_itemsize if group.wire.is_exchanged else FP32_NBYTES,
            )
            if adds_as_they_come and unit.is_trained:
                sizes = {numel * itemsize: count for numel, count in unit.numels.items()}
                need = replace(need, own_grads=grads_before_added_nbytes(sizes))
            return need

        is_seated = unit.kind in self.plan.seated and group.sizes.param > 1
        return replace(self._once(key, make), layer=unit.layer, is_seated=is_seated)

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
        """Of the same plan with other sizes. It shares nothing that was computed."""
        return replace(self, plan=replace(self.plan, sizes=sizes), known={})

    def work(self, kind: int, unit: Unit) -> list[Transfer]:
        """Of one operation on `unit`, one after the other."""
        if unit.numel == 0:
            return []
        return transfers(self.collectives(kind, unit), self.groups[unit.group], self.cluster)

    def collectives(self, kind: int, unit: Unit) -> list[Collective]:
        """Of one operation on `unit`, in their order."""
        sends_codes = self.plan.wire.gathers_codes and unit.kind in _IN_FP8
        in_codes = unit.matrix_numel if sends_codes else 0
        group = self.groups[unit.group]
        return unit_collectives(kind, self.padded(unit), self.model.itemsize, group, in_codes)

    def communication(self, stage: int) -> list[dict[int, list[Transfer]]]:
        """Of each unit of a stage, by kind of operation."""
        kinds = (GATHER, REDUCE, GRAD_SYNC, PARAM_SYNC)
        keys = [(unit.aligned_numel, unit.group, unit.kind) for unit in self.units[stage]]
        units = dict(zip(keys, self.units[stage], strict=True))
        known = {
            key: {kind: self.work(kind, unit) for kind in kinds} for key, unit in units.items()
        }
        return [known[key] for key in keys]

    def optimizer_s(self, stage: int) -> float:
        """Of a step."""
        nbytes = 0.0
        for unit in filter(lambda unit: unit.is_trained, self.units[stage]):
            sizes, numel = self.groups[unit.group].sizes, self.padded(unit) if unit.numel else 0
            nbytes += _OPTIMIZER_NBYTES * numel / sizes.optim + _ZEROED_NBYTES * numel / sizes.grad
        return nbytes / (1e9 * self.cluster.device.memory_gb_s)

    @cached_property
    def _stages(self) -> dict[int, list[Stage]]:
        """By the number of micro-batches."""
        return {}

    def stages(self, micro_batches: int) -> list[Stage]:
        """Of a step with so many micro-batches."""
        if micro_batches in self._stages:
            return self._stages[micro_batches]
        found = self._stages[micro_batches] = []
        for index in range(self.plan.parallel.pp):
            phases = self.phases(index, micro_batches)
            order = self.order(index, phases)
            times = self.optimizer_s(index), 1e-6 * self.cluster.device.step_us
            found.append(Stage(phases, order, self._costs[index], *times))
        return found

    # ---- memory

    @cached_property
    def memory(self) -> Memory:
        """Of the rank that needs most, with the padding of its units."""
        return max(map(self.stage_memory, range(self.plan.parallel.pp)), key=lambda of: of.total)

    def stage_memory(self, stage: int) -> Memory:
        """Of a rank of pipeline stage `stage`, as the engine allocates it: with padding. Raises
        ConfigurationError for a budget of memory in flight below what one layer needs."""
        plan, schedule = self.plan, self.plan.schedule
        key = (plan.parallel, plan.sizes, plan.expert_sizes, stage)
        at_rest, whole = self._once(("states", *key, plan.moments), lambda: self._states(stage))
        flying = self._once(("flying", *key, plan.wire, schedule), lambda: self.in_flight_of(stage))
        key = ("activations", plan.parallel, plan.batch, plan.recompute, stage)
        kept = self._once(key, lambda: stage_activations(self.setting, stage))
        copies = self._copies(stage) if plan.is_on_cpu else None
        preview = max(map(self._preview_nbytes, self.units[stage]), default=0.0)
        key = ("quantised", plan.parallel, stage)
        quantised = self._once(key, lambda: sum(map(self._quantised_numel, self.units[stage])))
        return Memory.of_rank(
            at_rest,
            flying,
            whole,
            kept,
            schedule,
            copies,
            preview,
            self.setting.kernels.copies_nbytes * quantised,
            self._buffers_nbytes(),
        )

    def _buffers_nbytes(self) -> float:
        """Of the engine's communicators on a rank."""
        used: set[GroupKey] = {unit.group for units in self.units for unit in units if unit.numel}
        number = sum(self.groups[key].num_communicators for key in used)
        return MIB * self.cluster.device.communicator_mib * number

    def _quantised_numel(self, unit: Unit) -> int:
        """Elements of weights that layers keep quantised, at most: all layers are taken to compute
        so, and a router."""
        kept = self.setting.kernels.keeps_quantised
        if kept == "none" or unit.kind not in _IN_FP8:
            return 0
        if kept == "all" or unit.kind == "experts":
            return unit.matrix_numel
        return unit.matrix_numel - shapes.without_experts(unit, self.model, self.plan.parallel)

    def _preview_nbytes(self, unit: Unit) -> float:
        """What computing the update of `unit` ahead takes, 0 where that does not happen."""
        schedule = self.plan.schedule
        has_room = self._outer_traffic(unit).may_have_room(schedule.early_update == "on")
        is_early = schedule.may_send_early and has_room and self._may_be_early(unit)
        if not (is_early and unit.is_trained):
            return 0.0
        moments = self.plan.moments.mean(unit.numel, unit.matrix_numel)
        padded, sizes = self.padded(unit), self.groups[unit.group].sizes
        shard = padded / sizes.param if self.model.itemsize == FP32_NBYTES else 0.0
        return preview_nbytes(padded / sizes.optim, moments, self.plan.has_loss_scale, shard)

    def _states(self, stage: int) -> tuple[dict[str, float], int]:
        """By state, and the bytes of the largest unit, whole."""
        units = [unit for unit in self.units[stage] if unit.numel]
        largest = max(map(self.padded, units), default=0)
        return self._states_of(units, self.padded), self.model.itemsize * largest

    def states_by_formula(self, stage: int) -> dict[str, float]:
        """At rest on a rank of pipeline stage `stage`, without padding."""
        units = [unit for unit in self.units[stage] if unit.numel]
        return self._states_of(units, lambda unit: unit.numel)

    def _states_of(
        self, units: Sequence[Unit], numel_of: Callable[[Unit], int]
    ) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for unit in units:
            moments = self.plan.moments.mean(unit.numel, unit.matrix_numel)
            sizes = self.groups[unit.group].sizes
            itemsize, main_grad = self.model.itemsize, self.plan.main_grad
            found = state_nbytes(numel_of(unit), itemsize, sizes, moments, main_grad)
            for state, nbytes in found.items():
                total[state] += nbytes if unit.is_trained or state == "model_param" else 0.0
        return dict(total)

    @property
    def least_in_flight(self) -> int:
        """Bytes without which no stage can run, of the chunk that needs most."""
        every = range(self.plan.parallel.pp)
        return max(sum(least_in_flight(chunk)) for stage in every for chunk in self._chunks(stage))

    def _chunks(self, stage: int) -> list[list[UnitInFlight]]:
        """What the units of each model chunk need beside their states; no empty chunk."""
        found: dict[int, list[UnitInFlight]] = {}
        for unit in self.units[stage]:
            if unit.numel:
                found.setdefault(unit.chunk, []).append(self.in_flight(unit))
        return list(found.values())

    def in_flight_of(self, stage: int) -> list[MemoryInFlight]:
        """Of each model chunk of a rank of `stage`."""
        of = self.plan.schedule
        chunks = self._chunks(stage)
        return [memory_in_flight(each, of.depth, budget=of.in_flight_nbytes) for each in chunks]

    def _copies(self, stage: int) -> Copies:
        params, grads, casts, itemsize = 0, 0, 0, self.model.itemsize
        for unit in filter(lambda unit: unit.numel, self.units[stage]):
            group = self.groups[unit.group]
            params = max(params, self.in_flight(unit).params)
            if not unit.is_trained:
                continue
            if group.sizes.grad > 1:
                pieces = grad_piece_numels(
                    self.padded(unit), group.sizes.grad, group.grad_slot_nbytes
                )
                grads = max(grads, FP32_NBYTES * pieces[0])
            elif itemsize != FP32_NBYTES:
                casts = max(casts, FP32_NBYTES * max(unit.numels))
        return Copies(params, grads, casts)

    @property
    def has_room(self) -> bool:
        """Whether the memory in flight that is allowed is enough for a step."""
        allowed = self.plan.schedule.in_flight_nbytes
        return allowed is None or self.least_in_flight <= allowed

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.cluster.device.usable_nbytes

    # ---- results

    def simulate(self, micro_batches: int, with_spans: bool = False) -> Step:
        """Every action of a step with so many micro-batches."""
        return simulate(
            self.stages(micro_batches),
            self.cluster.runs_ahead,
            self.compute.send_s,
            self.plan.parallel.virtual,
            with_spans,
        )

    def step(self) -> Step:
        """A step of the plan; of many micro-batches some are simulated: in the steady state each
        one more takes as long."""
        micro_batches, stages = self.plan.batch.num_micro_batches, self.plan.parallel.pp
        few, more = (count * stages for count in _FOLDED)
        if micro_batches <= more:
            return self.simulate(micro_batches)
        short, long = self.simulate(few), self.simulate(more)
        times = (micro_batches - more) / (more - few)
        return Step(
            _extrapolate(short.step_s, long.step_s, times),
            tuple(
                _extrapolated(before, after, times)
                for before, after in zip(short.stages, long.stages, strict=True)
            ),
        )

    @cached_property
    def node_nbytes(self) -> float:
        """That leave the node which sends most, in a step, for the three states."""
        found = []
        micro_batches, stages = self.plan.batch.num_micro_batches, self.plan.parallel.pp
        few, more = (count * stages for count in _FOLDED)
        for stage, units in enumerate(self.units):

            def left(count: int, stage: int = stage, units: tuple[Unit, ...] = units) -> float:
                groups = [self.groups[unit.group] for unit in units]
                actions = self.stages(count)[stage].order.actions
                actions = [one for one in actions if units[one.unit].numel]

                def issued(kind: int, index: int) -> list[Collective]:
                    return self.collectives(kind, units[index])

                return step_traffic(actions, issued, groups, self.cluster).node_nbytes

            if micro_batches <= more:
                found.append(left(micro_batches))
            else:
                times = (micro_batches - more) / (more - few)
                found.append(_extrapolate(left(few), left(more), times))
        return max(found)

    @cached_property
    def model_flops(self) -> float:
        """Of a step on all ranks, without what is computed again."""
        parallel, batch = self.plan.parallel, self.plan.batch
        of_rank = sum(
            unit.flops + self.compute.backward_flops(unit) for units in self.units for unit in units
        )
        return of_rank * self.cluster.num_ranks / parallel.pp * batch.num_micro_batches

    @property
    def tokens(self) -> int:
        """Of a step on all ranks."""
        parallel, batch = self.plan.parallel, self.plan.batch
        replicas = self.cluster.num_ranks // (parallel.tp * parallel.cp * parallel.pp)
        return batch.tokens * batch.num_micro_batches * replicas

    def mfu(self, step_s: float) -> float:
        peak = 1e12 * self.cluster.device.tflops * self.cluster.num_ranks
        return self.model_flops / (step_s * peak)


def chunk_visits(units: Sequence[Unit], chunk: int, is_tied: bool) -> list[Visit]:
    """The calls of a forward: the root around everything, experts and adapters within their layer,
    tied words within their embedding and again within the output layer."""
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


def _extrapolated(before: StageTimes, after: StageTimes, times: float) -> StageTimes:
    links = {
        link: _extrapolate(before.links_s[link], after.links_s[link], times)
        for link in after.links_s
    }
    return StageTimes(
        _extrapolate(before.compute_s, after.compute_s, times),
        _extrapolate(before.exposed_s, after.exposed_s, times),
        _extrapolate(before.bubble_s, after.bubble_s, times),
        links,
    )
