# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of the device path that break nothing, each with the reason: what is left out there is
covered by another order, or is for a CPU alone."""

from tests.mutants.device_faults import EARLY, ELSEWHERE, NO_WAIT, UNNOTED, UNWRITTEN, Fault

_ORDER_READS_NOTHING = (
    "The comparison reads nothing of theirs; a communicator runs its collectives in the order of "
    "their launch. The wait is for a CPU"
)
_ONE_STREAM = "The schedule `inline` alone passes it, which has one stream"
_NEXT_IS_A_GATHER = (
    "Nobody has read what was gathered, and what is written there next is another gather, on the "
    "same stream"
)
_NAN_EITHER_WAY = "New memory of the emulated device is NaN, which is what is written there"
_WRITTEN_LATER = "All of it is written before it is read"

HARMLESS: dict[Fault, str] = {
    Fault(NO_WAIT, "order: after reduce"): _ORDER_READS_NOTHING,
    Fault(NO_WAIT, "order: after grad-sync"): _ORDER_READS_NOTHING,
    Fault(NO_WAIT, "gathers.begin_use in decisions.use_unit: after gather"): _ONE_STREAM,
    Fault(EARLY, "gather: finish"): _ONE_STREAM,
    Fault(ELSEWHERE, "gather: finish"): _ONE_STREAM,
    Fault(EARLY, "gathers.abandon_gather in decisions._drop_spare"): _NEXT_IS_A_GATHER,
    Fault(ELSEWHERE, "gathers.abandon_gather in decisions._drop_spare"): _NEXT_IS_A_GATHER,
    Fault(UNNOTED, "memory_map.give_back in decisions._drop_spare"): _NEXT_IS_A_GATHER,
    Fault(UNWRITTEN, "full, unit._make_placeholders in unit._allocate_and_shard"): _NAN_EITHER_WAY,
}
