# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the gathers and reductions that memory budgets save on a rank in a step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.program import GATHER, REDUCE, OrderUnit

_SHARES = (0.0, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Saving:
    """The gathers and reductions of a rank in a step under two budgets."""

    keep_params_nbytes: int
    gathers: int
    keep_grads_nbytes: int
    reductions: int


def savings(costing: Costing) -> list[Saving]:
    """Return savings on a rank of the first stage, which communicates most.

    The budgets are none, the plan's, and parts of a rank's parameters up to all. The list is empty
    for one micro-batch, and for an order of micro-batches that the planner does not know.
    """
    plan = costing.plan
    if plan.batch.num_micro_batches == 1:
        return []
    asked = plan.schedule
    try:
        phases = costing.phases(0, plan.batch.num_micro_batches)
    except ValueError:
        return []
    units = costing.order(0, []).units
    rows = []
    for budgets in _budgets(units, (asked.keep_params_nbytes, asked.keep_grads_nbytes)):
        kept = replace(asked, keep_params_nbytes=budgets[0], keep_grads_nbytes=budgets[1])
        order = replace(costing, plan=replace(plan, schedule=kept)).order(0, phases)
        count = Counter(action.kind for action in order.actions)
        rows.append(Saving(budgets[0], count[GATHER], budgets[1], count[REDUCE]))
    return rows


def _budgets(units: Sequence[OrderUnit], asked: tuple[int, int]) -> list[tuple[int, int]]:
    params = sum(unit.memory.params for unit in units if unit.is_gathered)
    grads = sum(unit.sum_nbytes for unit in units if unit.is_reduced)
    tried = [(round(share * params), round(share * grads)) for share in _SHARES]
    return sorted({*tried, asked})
