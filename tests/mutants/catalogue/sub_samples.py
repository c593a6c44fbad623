# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: sub-samples on their own numbers of ranks, and the fillers that follow them."""

from tests.mutants.catalogue.mutant import Mutant

MUTANTS = [
    Mutant(
        "filled-to-all-ranks",
        "fillers fill a block to its own longest list",
        "planner/sub_samples.py",
        "*map(len, ranks))",
        "*map(len, group))",
        (
            "tests/planner/test_sub_samples.py::"
            "test_each_block_is_filled_to_its_longest_list_and_to_no_more"
        ),
    ),
    Mutant(
        "no-sub-sample-at-the-end",
        "each rank has a sub-sample in the last group, after which it reduces",
        "planner/sub_samples.py",
        "least = 1 if len(filled) == len(routes) - 1 else 0",
        "least = 0",
        (
            "tests/planner/test_sub_samples.py::"
            "test_each_block_is_filled_to_its_longest_list_and_to_no_more"
        ),
    ),
    Mutant(
        "fillers-of-one-number",
        "each filler has a number of its own",
        "planner/sub_samples.py",
        "fillers = count(-1, -1)",
        "fillers = iter(lambda: -1, None)",
        (
            "tests/planner/test_sub_samples.py::"
            "test_each_block_is_filled_to_its_longest_list_and_to_no_more"
        ),
    ),
    Mutant(
        "fillers-first",
        "fillers follow a rank's own sub-samples",
        "planner/sub_samples.py",
        "[*mine, *islice(fillers, longest - len(mine))]",
        "[*islice(fillers, longest - len(mine)), *mine]",
        (
            "tests/planner/test_sub_samples.py::"
            "test_each_block_is_filled_to_its_longest_list_and_to_no_more"
        ),
    ),
    Mutant(
        "long-fillers",
        "the planner counts a filler as one token",
        "planner/sub_samples.py",
        "self.lengths[number] if number >= 0 else 1",
        "self.lengths[number]",
        (
            "tests/planner/test_sub_samples.py::"
            "test_a_step_counts_fillers_and_the_longest_list_and_waits_where_ranks_wait"
        ),
    ),
    Mutant(
        "blocks-of-those-that-gather",
        "ranks that reduce together run equally many sub-samples",
        "mcore/patches/sub_samples.py",
        "max(settings.sizes.param, settings.sizes.grad)",
        "settings.sizes.param",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_the_rank_gets_the_fillers_of_its_own_list_each_with_fields_of_its_own"
        ),
    ),
    Mutant(
        "uneven-experts",
        "all ranks that exchange tokens run equally many sub-samples",
        "mcore/patches/sub_samples.py",
        "if run.num_experts:",
        "if False:",
        "tests/mcore/patches/test_sub_samples.py::test_with_experts_all_ranks_get_equally_many",
    ),
    Mutant(
        "shared-sub-samples",
        "a rerun gets sub-samples that no script has written to",
        "mcore/patches/sub_samples.py",
        "    longer = {name",
        "    if not rest:\n        return sample\n    longer = {name",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_the_rank_gets_the_fillers_of_its_own_list_each_with_fields_of_its_own"
        ),
    ),
    Mutant(
        "uneven-parts",
        "the ranks of a sub-sample have equal parts of it",
        "mcore/patches/sub_samples.py",
        "2 * num_ranks[number] if num_ranks[number] > 1 else 1",
        "1",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_a_sub_sample_of_two_ranks_grows_to_equal_parts_without_a_loss"
        ),
    ),
    Mutant(
        "padding-with-a-loss",
        "what makes parts equal adds no loss",
        "mcore/patches/sub_samples.py",
        'longer["loss_mask"][len(sample["tokens"]) :] = 0',
        "pass",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_a_sub_sample_of_two_ranks_grows_to_equal_parts_without_a_loss"
        ),
    ),
    Mutant(
        "fillers-with-a-loss",
        "a filler adds no loss",
        "mcore/patches/sub_samples.py",
        'filler["loss_mask"] = filler["loss_mask"] * 0',
        "pass",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_the_rank_gets_the_fillers_of_its_own_list_each_with_fields_of_its_own"
        ),
    ),
    Mutant(
        "fillers-too-short-to-split",
        "ranks of sequence parallelism have a token of a filler each",
        "mcore/patches/sub_samples.py",
        "split * parts)",
        "parts)",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_a_filler_is_split_over_the_ranks_of_sequence_parallelism"
        ),
    ),
    Mutant(
        "evaluated-by-sub-samples",
        "with --sft an evaluation averages the means of packed samples",
        "mcore/patches/sub_samples.py",
        "if by_packed and all(",
        "if not by_packed and all(",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_an_evaluation_with_sft_reports_packed_samples"
        ),
    ),
    Mutant(
        "evaluated-by-ranks",
        "the mean of a packed sample is that of its sub-samples on all ranks",
        "mcore/patches/sub_samples.py",
        "group=state.get_data_parallel_group(with_context_parallel=True)",
        "group=state.get_tensor_model_parallel_group()",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_an_evaluation_with_sft_reports_packed_samples"
        ),
    ),
    Mutant(
        "two-rerun-iterators",
        "the rerun machine replays one iterator",
        "mcore/patches/sub_samples.py",
        'getattr(data_iterator, "iterable", data_iterator)',
        "data_iterator",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_megatrons_rerun_mode_sees_one_iterator_which_reads_from_that_of_the_data"
        ),
    ),
    Mutant(
        "routed-twice",
        "the sub-samples of training are routed once",
        "mcore/patches/sub_samples.py",
        'if not hasattr(routed, "is_routed"):',
        "if True:",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_megatrons_own_schedule_takes_the_iterator_of_training_as_routed"
        ),
    ),
    Mutant(
        "positions-of-all-ranks",
        "rotary positions follow the ranks of a sub-sample",
        "mcore/patches/sub_samples.py",
        "packed.cp_group or _ALONE",
        "groups.cp",
        (
            "tests/mcore/patches/test_sub_samples.py::"
            "test_rotary_positions_follow_the_ranks_of_the_sub_sample"
        ),
    ),
]
