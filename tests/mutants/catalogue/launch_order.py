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
    ),
    Mutant(
        "the-host-waits-for-nothing",
        "a command begins after what the host waited for before it asked",
        "scripts/launch_order/queues.py",
        "        _join(clock, host)\n",
        "",
        _NEEDS,
    ),
    Mutant(
        "streams-of-one-queue-do-not-wait",
        "a wait holds up all that is behind it in its queue, of whatever stream",
        "scripts/launch_order/queues.py",
        "clock = clocks[command.stream % num_queues]",
        "clock = clocks[command.stream % num_queues].copy()",
        _NEEDS,
    ),
    Mutant(
        "a-rival-less",
        "a beginning is no choice where there is a place for all that can be beside it",
        "scripts/launch_order/interleavings.py",
        "return found if len(found) >= self._device.num_places else ()",
        "return found if len(found) > self._device.num_places else ()",
        _EVERY_ORDER,
    ),
    Mutant(
        "only-the-own-queue-is-tried",
        "all that may begin instead of an operation is tried too",
        "scripts/launch_order/interleavings.py",
        "more = self._rivals(state, queue)",
        "more = ()",
        _EVERY_ORDER,
    ),
    Mutant(
        "one-place-more",
        "no more collectives are on a device than it has places for",
        "scripts/launch_order/interleavings.py",
        "for queue in queues) >= self._device.num_places:",
        "for queue in queues) > self._device.num_places:",
        _EVERY_ORDER,
    ),
    Mutant(
        "a-kernel-of-messages-ends-with-one-of-them",
        "messages of one kernel keep their queue until all of them have met",
        "scripts/launch_order/interleavings.py",
        "not kernel.meetings[0].is_message,",
        "True,",
        _MESSAGES,
    ),
]
