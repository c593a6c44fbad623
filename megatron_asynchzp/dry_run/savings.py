# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what memory budgets would save: how many gathers and reductions a rank asks for in a step,
with parameters and gradients kept between micro-batches or without, by the planner's order.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_asynchzp.mcore.flags.asynchzp import resolve_schedule
from megatron_asynchzp.planner.activations import Setting
from megatron_asynchzp.planner.cluster import Cluster, Device, Link
from megatron_asynchzp.planner.costs import Costing, Plan
from megatron_asynchzp.planner.program import GATHER, REDUCE, OrderUnit, Schedule
from megatron_asynchzp.sharding.topology import ShardSizes

_SHARES = (0.0, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Saving:
    """keep_params_nbytes, keep_grads_nbytes: two budgets; gathers, reductions: that a rank asks for
    in a step with both."""

    keep_params_nbytes: int
    gathers: int
    keep_grads_nbytes: int
    reductions: int


def savings(args: Namespace, setting: Setting, sizes: ShardSizes) -> list[Saving]:
    """On a rank of the first stage, which asks for most: for no budget, those of `args` if there
    are any, and parts of a rank's parameters up to all.

    args: validated; setting: the planner's numbers of them. Empty where a step has one micro-batch,
    or an order of micro-batches that the planner does not know.
    """
    batch = setting.batch
    if batch.num_micro_batches == 1:
        return []
    asked = resolve_schedule(args)
    schedule = Schedule(asked.depth, asked.in_flight_nbytes, is_inline=asked.depth == 0)
    # The order does not depend on the cluster.
    cluster = Cluster("any", args.world_size, 1, Device(1.0, 1.0), Link(1.0), Link(1.0))
    plan = Plan(sizes, setting.parallel, batch, schedule, setting.recompute)
    costing = Costing(setting.model, plan, cluster)
    try:
        phases = costing.phases(0, batch.num_micro_batches)
    except ValueError:
        return []
    units = costing.order(0, []).units
    found = []
    for budgets in _budgets(units, (asked.keep_params_nbytes, asked.keep_grads_nbytes)):
        kept = replace(schedule, keep_params_nbytes=budgets[0], keep_grads_nbytes=budgets[1])
        order = replace(costing, plan=replace(plan, schedule=kept)).order(0, phases)
        count = Counter(action.kind for action in order.actions)
        found.append(Saving(budgets[0], count[GATHER], budgets[1], count[REDUCE]))
    return found


def _budgets(units: Sequence[OrderUnit], asked: tuple[int, int]) -> list[tuple[int, int]]:
    """Of parameters and of gradients, the smallest first."""
    params = sum(unit.memory.params for unit in units if unit.is_gathered)
    grads = sum(unit.sum_nbytes for unit in units if unit.is_reduced)
    tried = [(round(share * params), round(share * grads)) for share in _SHARES]
    return sorted({*tried, asked})
