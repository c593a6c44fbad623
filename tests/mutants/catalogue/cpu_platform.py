# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: the CPU platform, on which stock Megatron is the reference."""

from tests.mutants.catalogue.mutant import Mutant

_LAYERS = "tests/cpu_platform/test_layers.py::test_"

MUTANTS = [
    Mutant(
        "a-chunk-forgets-the-one-before",
        "a Mamba layer's state goes from chunk to chunk",
        "cpu_platform/state_space.py",
        "outputs.append(inside + carried)",
        "outputs.append(inside)",
        f"{_LAYERS}a_scan_in_chunks_is_the_recurrence_in_value_and_gradient",
    ),
    Mutant(
        "a-convolution-that-looks-ahead",
        "a Mamba layer is causal",
        "cpu_platform/state_space.py",
        "(taps - 1, 0)",
        "(taps - 2, 1)",
        f"{_LAYERS}no_step_sees_a_later_one",
    ),
    Mutant(
        "norms-of-a-split-sequence-are-not-summed",
        "gradients of norms are summed over tensor-parallel ranks with sequence parallelism",
        "cpu_platform/norms.py",
        "param.sequence_parallel = config.sequence_parallel",
        "param.sequence_parallel = False",
        f"{_LAYERS}every_parameter_of_a_norm_says_whether_its_gradient_is_summed_over_a_split_sequence",
    ),
    Mutant(
        "every-piece-comes-from-the-first-rank",
        "tensors that differ in size between ranks are gathered in rank order",
        "cpu_platform/devices.py",
        "dist.broadcast(piece, group=group, async_op=async_op, group_src=rank)",
        "dist.broadcast(piece, group=group, async_op=async_op, group_src=0)",
        "tests/cpu_platform/test_cpu_platform.py::"
        "test_tensors_that_differ_in_size_between_ranks_are_gathered_and_scattered",
    ),
]
