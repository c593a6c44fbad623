# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: experts in groups."""

from tests.mutants.catalogue.in_flight import IN_FLIGHT
from tests.mutants.catalogue.mutant import Mutant

_PARTS = "tests/zero/test_parts.py::test_"
_SAME_BITS = f"{_PARTS}experts_in_groups_are_the_same_in_every_bit_whatever_is_computed_again"
_NO_MORE = f"{_PARTS}from_the_least_memory_to_the_default_no_more_groups_are_there_than_it_holds"

MUTANTS = [
    Mutant(
        "groups-stay-when-computed-again",
        "a group of experts that was computed again is released until its backward",
        "zero/autograd.py",
        "is_kept = self._batch.in_backward and not unit.part",
        "is_kept = self._batch.in_backward",
        _NO_MORE,
    ),
    Mutant(
        "group-released-by-each-expert",
        "a group of experts is gathered once for all its experts",
        "zero/autograd.py",
        "if is_last and self._batch.depth[unit] == 0",
        "if self._batch.depth[unit] == 0",
        f"{_PARTS}a_group_is_gathered_once_for_all_its_experts_before_their_order_is_known",
    ),
    Mutant(
        "group-reduced-before-its-first-expert",
        "a group of experts is reduced when the first of them has its gradients",
        "zero/autograd.py",
        "if is_first and torch.is_grad_enabled():",
        "if is_last and torch.is_grad_enabled():",
        _SAME_BITS,
    ),
    Mutant(
        "no-room-for-the-layer",
        "what is placed ahead of its use leaves room for the other units of its layer",
        "zero/gathers.py",
        "if leaves_room and not self._leaves_room(unit):",
        "if False:",
        _NO_MORE,
    ),
    Mutant(
        "groups-without-the-rest-of-their-layer",
        "memory in flight has the rest of a layer beside each of its parts",
        "sharding/in_flight.py",
        "taken[False, layers[layer][0]] += 1",
        "taken[False, layers[layer][0]] += 0",
        f"{IN_FLIGHT}parts_of_a_layer_are_needed_one_after_another_beside_the_rest_of_it",
    ),
    Mutant(
        "all-experts-at-a-time",
        "groups of experts are parts of their layer that are needed one after another",
        "zero/plan.py",
        'plan_part = path if part else ""',
        'plan_part = ""',
        f"{_PARTS}experts_form_units_within_their_layer_in_the_order_of_their_calls",
    ),
    Mutant(
        "groups-of-grouped-gemm",
        "groups of experts that are computed together are refused",
        "mcore/flags/checks.py",
        "if args.moe_grouped_gemm:",
        "if False:",
        "tests/mcore/flags/test_checks.py::"
        "test_groups_of_experts_that_cannot_be_are_refused_with_the_remedy",
    ),
    Mutant(
        "groups-whole-until-their-layer-is",
        "a group of experts is sharded as soon as it is complete",
        "mcore/construction.py",
        "if len(experts) % self._per_unit == 0:",
        "if False:",
        "tests/mcore/test_construction.py::"
        "test_no_rank_holds_more_than_its_shards_and_a_unit_of_a_model_that_is_built",
    ),
    Mutant(
        "groups-computed-again-at-no-cost",
        "the dry run counts the gathers of experts that are computed again",
        "dry_run/expert_groups.py",
        "gathers += max(0, groups - 1 - schedule.depth)",
        "gathers += 0",
        "tests/dry_run/test_command.py::"
        "test_what_each_group_of_experts_costs_is_what_a_run_with_it_takes",
    ),
]
