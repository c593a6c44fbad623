# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: the search for circles in what ranks launched."""

from tests.mutants.catalogue.mutant import Mutant

_TESTS = "tests/launch_order/test_interleavings.py::"
_EVERY_ORDER = (
    f"{_TESTS}test_the_search_finds_a_circle_where_some_order_of_all_commands_ends_in_one"
)
_NEEDS = (
    "tests/launch_order/test_queues.py::"
    "test_a_collective_needs_those_of_its_rank_without_whose_end_it_cannot_begin"
)
_MESSAGES = f"{_TESTS}test_messages_of_one_kernel_end_with_the_last_of_them"

MUTANTS = [
    Mutant(
        "a-stream-waits-for-nothing",
        "a command begins after what its stream waits for",
        "scripts/launch_order/queues.py",
        "        _join(clock, after)\n",
        "",
        _NEEDS,
    )
]
