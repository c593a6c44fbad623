# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of the device path that break nothing, each with the reason: what is left out there is
covered by another order, or is for a CPU alone."""

from tests.mutants.device_faults import (
    EARLY,
    ELSEWHERE,
    FREED,
    NO_LANE,
    NO_WAIT,
    REUSED,
    UNNOTED,
    UNWRITTEN,
    Fault,
)

_ORDER_READS_NOTHING = (
    "The comparison reads nothing of theirs; a communicator runs its collectives in the order of "
    "their launch. The wait is for a CPU"
)
_ONE_STREAM = "The schedule `inline` alone passes it, which has one stream"
_NEXT_IS_A_GATHER = (
    "Nobody has read what was gathered, and what is written there next is another gather, on the "
    "same stream"
)
_PLACEHOLDER = (
    "What stands for a parameter that is not gathered is read by nobody but a program that is wrong"
)
_FOR_THE_WATCHDOG = (
    "Who computes waits for it once, and then by its handle; the event tells the watchdog that the "
    "task has ended"
)
_OWN_OPERANDS = (
    "The task makes what it compares, on its own stream; the event is for the comparison that "
    "describes a difference, which has a place of its own"
)
_WRITER_HAS_WAITED = (
    "The stream that computes writes there first, and it has waited for the reduction before"
)
_ONLY_A_HANDLE = (
    "What is left to do then is a wait for a handle and an event behind it, on whichever stream"
)
_PADDING = "The parameters are copied over it, and nobody reads the padding between them"
_INITIAL = (
    "Parameters are copied over it, gradients are set to zero when a step begins, and nobody reads "
    "the padding"
)
_ORDER_OF_LAUNCH = (
    "A communicator runs its collectives in the order of their launch, from whichever stream, and "
    "what follows waits for handles and events"
)
_CUT_OFF = "What lies behind the gradients is cut off again"

HARMLESS: dict[Fault, str] = {
    Fault(NO_WAIT, "order: after reduce"): _ORDER_READS_NOTHING,
    Fault(NO_WAIT, "order: after grad-sync"): _ORDER_READS_NOTHING,
    Fault(NO_WAIT, "gathers.begin_use in decisions.use_unit: after gather"): _ONE_STREAM,
    Fault(EARLY, "gather: finish"): _ONE_STREAM,
    Fault(ELSEWHERE, "gather: finish"): _ONE_STREAM,
    Fault(EARLY, "gathers.abandon_gather in decisions._drop_spare"): _NEXT_IS_A_GATHER,
    Fault(ELSEWHERE, "gathers.abandon_gather in decisions._drop_spare"): _NEXT_IS_A_GATHER,
    Fault(UNNOTED, "memory_map.give_back in decisions._drop_spare"): _NEXT_IS_A_GATHER,
    Fault(EARLY, "gather: order_stream"): _FOR_THE_WATCHDOG,
    Fault(ELSEWHERE, "gather: order_stream"): _FOR_THE_WATCHDOG,
    Fault(EARLY, "param-sync: order_stream"): _FOR_THE_WATCHDOG,
    Fault(ELSEWHERE, "param-sync: order_stream"): _FOR_THE_WATCHDOG,
    Fault(EARLY, "order: order_stream"): _FOR_THE_WATCHDOG,
    Fault(ELSEWHERE, "order: order_stream"): _FOR_THE_WATCHDOG,
    Fault(EARLY, "order_check._submit in order_check.start"): _OWN_OPERANDS,
    Fault(ELSEWHERE, "order_check._submit in order_check.start"): _OWN_OPERANDS,
    Fault(REUSED, "arena.place_at in reductions._acquire_place"): _WRITER_HAS_WAITED,
    Fault(NO_LANE, "gather: is completed"): _ONLY_A_HANDLE,
    Fault(NO_LANE, "param-sync: is completed"): _ONLY_A_HANDLE,
    Fault(NO_LANE, "gather: is issued"): _ORDER_OF_LAUNCH,
    Fault(NO_LANE, "reduce: is issued"): _ORDER_OF_LAUNCH,
    Fault(NO_LANE, "reduce: is completed"): _ORDER_OF_LAUNCH,
    Fault(UNWRITTEN, "zeros, unit._new_buffer in unit._allocate_and_shard"): _INITIAL,
    Fault(FREED, "full, unit._make_placeholders in unit._allocate_and_shard"): _PLACEHOLDER,
    Fault(UNWRITTEN, "full, unit._make_placeholders in unit._allocate_and_shard"): _PLACEHOLDER,
    Fault(UNWRITTEN, "zero_, buffer.copy_params in unit._allocate_and_shard"): _PADDING,
    Fault(UNWRITTEN, "new_zeros, grad-sync: collectives.rounded_all_reduce_steps"): _CUT_OFF,
}
