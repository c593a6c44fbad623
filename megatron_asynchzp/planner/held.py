# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Sharding groups and units of a rank, and their bytes at rest, in flight and at the peak."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron_asynchzp.engine.sharding.early_units import OuterTraffic, preview_nbytes
from megatron_asynchzp.engine.sharding.in_flight import (
    FP32_NBYTES,
    MemoryInFlight,
    UnitInFlight,
    grads_before_added_nbytes,
    least_in_flight,
    memory_in_flight,
    num_on_host,
)
from megatron_asynchzp.engine.sharding.topology import ShardTopology
from megatron_asynchzp.planner import model as shapes
from megatron_asynchzp.planner.activations import FUSED, Kernels, RunShape
from megatron_asynchzp.planner.cluster import MIB, Cluster
from megatron_asynchzp.planner.memory import (
    Copies,
    Memory,
    stage_activations,
    state_nbytes,
    total_nbytes,
)
from megatron_asynchzp.planner.model import GroupKey, Model, Unit
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.traffic import Group, grad_piece_numels

IN_FP8 = ("layer", "experts", "mtp")
"""Kinds of units whose weights belong to layers of Transformer Engine."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a plan for a model on a cluster. Raises ValueError if ranks do not divide."""

    model: Model
    plan: Plan
    cluster: Cluster
    kernels: Kernels = FUSED
    # Results that plans for the same model, cluster and kernels share.
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        parallel, ranks = self.plan.parallel, self.cluster.num_ranks
        for product, sizes in (
            (parallel.tp * parallel.cp * parallel.pp, "tensor x context x pipeline"),
            (parallel.experts_tp * parallel.ep * parallel.pp, "expert x pipeline"),
        ):
            if ranks % product:
                raise ValueError(f"{sizes} parallel size {product} does not divide {ranks} ranks")
        self.plan.sizes.check(self.dense_ranks)

    def once[Value](self, key: object, make: Callable[[], Value]) -> Value:
        """Return the known result of `key`, or make it now."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    @property
    def setting(self) -> RunShape:
        plan = self.plan
        return RunShape(self.model, plan.parallel, plan.batch, self.kernels, plan.recompute)

    # ---- groups

    @property
    def dense_ranks(self) -> int:
        parallel = self.plan.parallel
        return self.cluster.num_ranks // (parallel.tp * parallel.pp)

    @cached_property
    def groups(self) -> dict[GroupKey, Group]:
        parallel, plan = self.plan.parallel, self.plan
        distance = parallel.experts_tp * parallel.ep
        expert_ranks = self.cluster.num_ranks // (distance * parallel.pp)
        expert_sizes = plan.expert_sizes or plan.sizes.restricted_to(expert_ranks)
        slot = plan.schedule.grad_slot_nbytes
        return {
            "dense": Group(self.dense_ranks, plan.sizes, parallel.tp, plan.wire, slot),
            "expert": Group(expert_ranks, expert_sizes, distance, plan.wire, slot),
        }

    # ---- units

    @cached_property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        model, plan = self.model, self.plan

        def make() -> tuple[tuple[Unit, ...], ...]:
            stages = range(plan.parallel.pp)
            return tuple(shapes.stage_units(model, plan.parallel, plan.batch, at) for at in stages)

        return self.once(("units", plan.parallel, plan.batch), make)

    def padded(self, unit: Unit) -> int:
        return self.groups[unit.group].padded(unit.aligned_numel)

    def _outer_traffic(self, unit: Unit) -> OuterTraffic:
        group, wire = self.groups[unit.group], self.plan.wire
        numel = self.padded(unit) if unit.numel else 0
        itemsizes = self.model.itemsize, wire.grad_itemsize if wire.is_exchanged else FP32_NBYTES
        return OuterTraffic.of(numel, *itemsizes, group.sizes, group.ranks)

    def _may_be_early(self, unit: Unit) -> bool:
        """Whether reduction completes gradients; stages sum those of tied embeddings later."""
        return self.plan.parallel.pp == 1 or unit.kind not in ("embedding", "output")

    def in_flight(self, unit: Unit) -> UnitInFlight:
        group, itemsize = self.groups[unit.group], self.model.itemsize
        padded = self.padded(unit)
        adds_as_they_come = group.sizes.grad == 1
        numels = tuple(unit.numels.items()) if adds_as_they_come else ()
        key = ("in flight", padded, group, numels, unit.is_trained)

        def make() -> UnitInFlight:
            # Only the axes within the gradient shard count.
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
        return replace(self.once(key, make), layer=unit.layer, is_seated=is_seated)

    # ---- memory

    @cached_property
    def memory(self) -> Memory:
        return max(map(self.stage_memory, range(self.plan.parallel.pp)), key=lambda of: of.total)

    def stage_memory(self, stage: int) -> Memory:
        """Return the memory of a rank of `stage`, padded, or refuse too small a budget."""
        plan, schedule = self.plan, self.plan.schedule
        key = (plan.parallel, plan.sizes, plan.expert_sizes, stage)
        at_rest, whole, away = self.once(
            ("states", *key, plan.moments, plan.offload), lambda: self._states(stage)
        )
        flying = self.in_flight_of(stage)
        key = ("activations", plan.parallel, plan.batch, plan.recompute, stage)
        kept = self.once(key, lambda: stage_activations(self.setting, stage))
        copies = self._copies(stage) if plan.is_on_cpu else None
        preview = max(map(self._preview_nbytes, self.units[stage]), default=0.0)
        key = ("quantised", plan.parallel, stage)
        quantised = self.once(key, lambda: sum(map(self._quantised_numel, self.units[stage])))
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
            away,
        )

    def _buffers_nbytes(self) -> float:
        used: set[GroupKey] = {unit.group for units in self.units for unit in units if unit.numel}
        number = sum(self.groups[key].num_communicators for key in used)
        return MIB * self.cluster.device.communicator_mib * number

    def _quantised_numel(self, unit: Unit) -> int:
        """Return the most elements of weights that layers keep quantised, if all layers are."""
        kept = self.setting.kernels.keeps_quantised
        if kept == "none" or unit.kind not in IN_FP8:
            return 0
        if kept == "all" or unit.kind == "experts":
            return unit.matrix_numel
        return unit.matrix_numel - shapes.without_experts(unit, self.model, self.plan.parallel)

    def _preview_nbytes(self, unit: Unit) -> float:
        schedule = self.plan.schedule
        has_room = self._outer_traffic(unit).may_have_room(schedule.early_update == "on")
        is_early = schedule.may_send_early and has_room and self._may_be_early(unit)
        if not (is_early and unit.is_trained):
            return 0.0
        moments = self.plan.moments.mean(unit.numel, unit.matrix_numel)
        padded, sizes = self.padded(unit), self.groups[unit.group].sizes
        shard = padded / sizes.param if self.model.itemsize == FP32_NBYTES else 0.0
        return preview_nbytes(padded / sizes.optim, moments, self.plan.has_loss_scale, shard)

    def _states(self, stage: int) -> tuple[dict[str, float], int, float]:
        """Return bytes by state, those of the largest unit and of main parameters on the host."""
        units = [unit for unit in self.units[stage] if unit.numel]
        largest = max(map(self.padded, units), default=0)
        of_units = self._states_of(units, self.padded)
        away = sum(states["main_param"] for states, is_on_host in of_units if is_on_host)
        return total_nbytes(of_units), self.model.itemsize * largest, away

    def states_by_formula(self, stage: int) -> dict[str, float]:
        units = [unit for unit in self.units[stage] if unit.numel]
        return total_nbytes(self._states_of(units, lambda unit: unit.numel))

    def _states_of(
        self, units: Sequence[Unit], numel_of: Callable[[Unit], int]
    ) -> list[tuple[dict[str, float], bool]]:
        trained = [unit for unit in units if unit.is_trained]
        numels = [self.padded(unit) // self.groups[unit.group].sizes.optim for unit in trained]
        on_host = trained[: num_on_host(numels, self.plan.offload)]
        total: list[tuple[dict[str, float], bool]] = []
        for unit in units:
            moments = self.plan.moments.mean(unit.numel, unit.matrix_numel)
            shape = numel_of(unit), self.model.itemsize, self.groups[unit.group].sizes
            states = state_nbytes(*shape, moments, self.plan.main_grad, unit.is_trained)
            total.append((states, any(unit is moved for moved in on_host)))
        return total

    @property
    def saved_nbytes(self) -> float:
        """Bytes of a checkpoint, which has parameters, main parameters and moments once."""
        itemsize, total = self.model.itemsize, 0.0
        main = FP32_NBYTES if itemsize < FP32_NBYTES else 0
        for unit in filter(lambda unit: unit.numel, self.model.units):
            trained = main + self.plan.moments.mean(unit.numel, unit.matrix_numel)
            total += unit.numel * (itemsize + trained * unit.is_trained)
        return total

    @property
    def least_in_flight(self) -> int:
        every = range(self.plan.parallel.pp)
        return max(sum(least_in_flight(chunk)) for stage in every for chunk in self._chunks(stage))

    def _chunks(self, stage: int) -> list[list[UnitInFlight]]:
        chunks: dict[int, list[UnitInFlight]] = {}
        for unit in self.units[stage]:
            if unit.numel:
                chunks.setdefault(unit.chunk, []).append(self.in_flight(unit))
        return list(chunks.values())

    def in_flight_of(self, stage: int) -> list[MemoryInFlight]:
        plan, of = self.plan, self.plan.schedule

        def make() -> list[MemoryInFlight]:
            chunks = self._chunks(stage)
            return [memory_in_flight(each, of.depth, budget=of.in_flight_nbytes) for each in chunks]

        key = (plan.parallel, plan.sizes, plan.expert_sizes, stage, plan.wire, of)
        return self.once(("flying", *key), make)

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
        allowed = self.plan.schedule.in_flight_nbytes
        return allowed is None or self.least_in_flight <= allowed

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.cluster.device.usable_nbytes
