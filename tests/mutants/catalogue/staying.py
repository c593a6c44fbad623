# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: what stays in memory between micro-batches."""

from tests.mutants.catalogue.mutant import Mutant

_RESIDENCY = "tests/sharding/test_residency.py::test_"
_STAYING = "tests/zero/test_staying.py::test_"

MUTANTS = [
    Mutant(
        "chunks-that-do-not-yield",
        "what another chunk has gathered ahead yields to what is needed now",
        "zero/gathers.py",
        "            *((chunk, unit) for chunk in others for unit in chunk._gathers),\n",
        "",
        f"{_STAYING}what_one_chunk_gathers_ahead_yields_to_what_another_needs_now",
    ),
    Mutant(
        "a-budget-without-limit",
        "what is kept never exceeds its budget",
        "sharding/residency.py",
        "while nbytes > budget:",
        "while False:",
        f"{_RESIDENCY}what_is_kept_never_exceeds_the_budget",
    ),
    Mutant(
        "what-is-needed-first-goes",
        "where memory is short, what is used last in the future goes",
        "sharding/residency.py",
        "drop(max(open_gaps, key=open_gaps.__getitem__))",
        "drop(min(open_gaps, key=open_gaps.__getitem__))",
        f"{_RESIDENCY}of_equal_units_no_choice_keeps_more",
    ),
    Mutant(
        "a-sum-that-does-not-count",
        "the sum of gradients that is added to counts as kept",
        "sharding/residency.py",
        "if counts_own:\n            shrink()",
        "if False:\n            shrink()",
        f"{_STAYING}the_allocator_counts_no_more_for_what_is_kept_than_the_budgets",
    ),
    Mutant(
        "kept-after-a-departure",
        "a step that departs from the one before keeps nothing more",
        "sharding/residency.py",
        "return self._is_followed and self._last.get(user) in self._gaps",
        "return self._last.get(user) in self._gaps",
        f"{_RESIDENCY}after_a_departure_nothing_more_is_kept_and_the_step_is_the_next_ones_record",
    ),
    Mutant(
        "kept-places-are-taken-first",
        "a unit that is to stay loses its place last",
        "zero/gathers.py",
        "*((chunk, unit) for chunk, unit in all_kept if not chunk._is_to_stay(unit)),",
        "",
        f"{_STAYING}a_stage_gathers_and_reduces_no_more_often_than_the_best_choice_does",
    ),
    Mutant(
        "the-most-that-a-rank-has-left",
        "all ranks keep within the least that any of them has left",
        "zero/gathers.py",
        "dist.all_reduce(least, dist.ReduceOp.MIN)",
        "dist.all_reduce(least, dist.ReduceOp.MAX)",
        f"{_STAYING}what_stays_changes_no_bit_but_by_the_order_in_which_gradients_are_added",
    ),
    Mutant(
        "sums-in-16-bits",
        "gradients that are kept are added up in fp32",
        "zero/reductions.py",
        "        self.take(unit, range(len(unit.params)))\n        self._kept.add(unit)",
        "        self._collect(unit)\n        self._kept.add(unit)",
        "tests/zero/test_random_schedules.py::test_4_random_schedules_and_budgets_give_the_bits_of_"
        "the_inline_schedule_and_lose_no_place",
    ),
    Mutant(
        "a-plan-that-keeps-no-gradients",
        "the planner keeps the gradients that the engine keeps",
        "planner/order.py",
        "if not is_last and self.kept_grads.keeps(unit):",
        "if False:",
        "tests/planner/test_traffic.py::test_the_planner_submits_what_the_engine_submits_in_the_same_"
        "order",
    ),
    Mutant(
        "gradients-kept-past-the-last-micro-batch",
        "what is kept for a micro-batch that does not come is reduced at the end",
        "zero/step.py",
        "if self.reductions.is_kept(unit):",
        "if False:",
        f"{_STAYING}gradients_kept_for_a_micro_batch_that_does_not_come_are_reduced_at_the_end",
    ),
]
