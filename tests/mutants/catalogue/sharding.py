# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: where every byte lives."""

from tests.mutants.catalogue.mutant import Mutant

_TOPOLOGY = "tests/sharding/test_topology.py::test_"
_LAYOUT = "tests/sharding/test_layout.py::test_"

MUTANTS = [
    Mutant(
        "shard-axis-order",
        "law 1: a rank's shard is cut axis by axis, the inner one first",
        "sharding/topology.py",
        "for axis in self.axes_between(1, shard_size):",
        "for axis in reversed(self.axes_between(1, shard_size)):",
        f"{_TOPOLOGY}a_ranks_optimizer_shard_lies_within_its_gradient_and_its_parameter_shard",
    ),
    Mutant(
        "sizes-that-do-not-nest",
        "law 1: sizes that do not nest are refused",
        "sharding/topology.py",
        "if large % small:",
        "if False:",
        f"{_TOPOLOGY}exactly_the_nested_sizes_are_accepted",
    ),
    Mutant(
        "replica-index",
        "one replica of each optimizer shard counts in norms",
        "sharding/topology.py",
        "return self.rank // self.sizes.optim",
        "return self.rank % self.sizes.optim",
        f"{_TOPOLOGY}ranks_with_the_same_optimizer_shard_are_the_replicas_and_one_of_them_counts",
    ),
    Mutant(
        "expert-sizes",
        "the sizes of experts nest in their smaller group",
        "sharding/topology.py",
        "ShardSizes(*(gcd(size, world_size)",
        "ShardSizes(*(min(size, world_size)",
        f"{_TOPOLOGY}sizes_restricted_to_a_smaller_group_still_nest",
    ),
    Mutant(
        "range-intersection",
        "an empty part of a parameter has no elements",
        "sharding/topology.py",
        "return Range(start, max(start, min(self.stop, other.stop)))",
        "return Range(start, min(self.stop, other.stop))",
        f"{_LAYOUT}a_shard_filled_from_parameters_holds_exactly_its_part_of_each",
    ),
    Mutant(
        "param-offsets",
        "every parameter begins at an aligned offset",
        "sharding/layout.py",
        "offset = round_up(offset + count, PARAM_ALIGNMENT_NUMEL)",
        "offset = offset + count",
        f"{_LAYOUT}parameters_are_aligned_disjoint_and_in_order_and_the_whole_divides",
    ),
    Mutant(
        "layout-padding",
        "the flat buffer divides over the optimizer shards",
        "sharding/layout.py",
        "num_shards * PARAM_ALIGNMENT_NUMEL)",
        "PARAM_ALIGNMENT_NUMEL)",
        f"{_LAYOUT}parameters_are_aligned_disjoint_and_in_order_and_the_whole_divides",
    ),
    Mutant(
        "checkpoint-boxes",
        "the boxes of a shard in a checkpoint are its elements",
        "sharding/boxes.py",
        "first, last = -(-start // row_numel), stop // row_numel",
        "first, last = start // row_numel, stop // row_numel",
        "tests/sharding/test_boxes.py::"
        "test_the_boxes_are_the_elements_of_the_range_one_after_another",
    ),
]
