# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Memory in flight as a step uses it: what the formula allots is enough, whatever it holds."""

import random

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.in_flight import (
    ALIGNMENT_NBYTES,
    UnitInFlight,
    least_in_flight,
    memory_in_flight,
)
from megatron_asynchzp.engine.sharding.memory_map import Extent, MemoryMap
from megatron_asynchzp.planner.order import StepOrder
from megatron_asynchzp.planner.program import OrderUnit, Phase, Visit

NUM_PROGRAMS = 600


def random_units(chance: random.Random) -> tuple[list[UnitInFlight], tuple[Visit, ...]]:
    """One or two units around one to three layers of up to four units; and how a forward calls
    them."""
    needs: list[UnitInFlight] = []

    def add(layer: str) -> int:
        nbytes = ALIGNMENT_NBYTES * chance.randint(1, 8)
        needs.append(UnitInFlight(layer, nbytes, ALIGNMENT_NBYTES, nbytes, 1))
        return len(needs) - 1

    around = [add("") for _ in range(chance.randint(1, 2))]
    layers: list[Visit] = []
    for layer in range(chance.randint(1, 3)):
        outer = add(f"layer {layer}")
        inner = range(chance.randint(0, 3))
        layers.append(Visit(outer, tuple(Visit(add(f"layer {layer}")) for _ in inner)))
    visits = tuple(layers)
    for one in reversed(around):
        visits = (Visit(one, visits),)
    return needs, visits


def test_no_budget_from_the_least_on_is_exceeded_by_layers_of_units_within_units_around_them(
    monkeypatch,
):
    """All that is needed together finds its place: places are chosen so that the rest still fits
    beside what stays, units around all layers included."""

    honest = MemoryMap.grow

    def grow_once(self: MemoryMap, nbytes: int) -> Extent:
        assert not self.nbytes, f"{nbytes} bytes more than the formula"
        return honest(self, nbytes)

    monkeypatch.setattr(MemoryMap, "grow", grow_once)
    phases = [Phase(True, 0, 0), Phase(False, 0, 0), Phase(True, 0, 1), Phase(False, 0, 1, True)]
    for seed in range(NUM_PROGRAMS):
        chance = random.Random(seed)
        needs, visits = random_units(chance)
        least, most = sum(least_in_flight(needs)), memory_in_flight(needs, 2)
        budget = chance.randint(least, max(least, most.params + most.grads))
        schedule = ScheduleConfig("main-thread", chance.randint(0, 2), budget)
        units = [OrderUnit(unit.params, unit) for unit in needs]
        assert StepOrder(units, [visits], phases, schedule).actions, seed
