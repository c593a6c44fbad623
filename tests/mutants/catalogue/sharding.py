# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: where every byte lives."""

from tests.mutants.catalogue.mutant import Mutant

MUTANTS = [
    Mutant(
        "shard-axis-order",
        "law 1: a rank's shard is cut axis by axis, the inner one first",
        "engine/sharding/topology.py",
        "for axis in self.axes_between(1, shard_size):",
        "for axis in reversed(self.axes_between(1, shard_size)):",
        (
            "tests/sharding/test_topology.py::"
            "test_a_ranks_optimizer_shard_lies_within_its_gradient_and_its_parameter_shard"
        ),
    ),
    Mutant(
        "replica-index",
        "one replica of each optimizer shard counts in norms",
        "engine/sharding/topology.py",
        "return self.rank // self.sizes.optim",
        "return self.rank % self.sizes.optim",
        (
            "tests/sharding/test_topology.py::"
            "test_ranks_with_the_same_optimizer_shard_are_the_replicas_and_one_of_them_counts"
        ),
    ),
    Mutant(
        "param-offsets",
        "every parameter begins at an aligned offset",
        "engine/sharding/layout.py",
        "offset = round_up(offset + count, PARAM_ALIGNMENT_NUMEL)",
        "offset = offset + count",
        (
            "tests/sharding/test_layout.py::"
            "test_parameters_are_aligned_disjoint_and_in_order_and_the_whole_divides"
        ),
    ),
    Mutant(
        "checkpoint-boxes",
        "the boxes of a shard in a checkpoint are its elements",
        "engine/sharding/layout.py",
        "first, last = -(-start // row_numel), stop // row_numel",
        "first, last = start // row_numel, stop // row_numel",
        (
            "tests/sharding/test_boxes.py::"
            "test_the_boxes_are_the_elements_of_the_range_one_after_another"
        ),
    ),
    Mutant(
        "places-across-their-neighbours",
        "law 5: two units never hold the same byte",
        "engine/sharding/memory_map.py",
        "                start = extent[1]\n",
        "",
        (
            "tests/comm/test_arena.py::"
            "test_places_never_overlap_lie_within_and_depend_on_the_order_of_calls_alone"
        ),
    ),
    Mutant(
        "a-budget-without-limit",
        "what is kept never exceeds its budget",
        "engine/sharding/residency.py",
        "while nbytes > budget:",
        "while False:",
        "tests/sharding/test_residency.py::test_what_is_kept_never_exceeds_the_budget",
    ),
]
