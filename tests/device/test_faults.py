# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Faults put into the device path on purpose are noticed on the emulated device, and the published
table is that of the record."""

import json

import pytest

from scripts.testbed.device.worlds import DeviceWorlds
from tests.mutants.device_faults import (
    EARLY,
    FOREIGN_MEMORY,
    KINDS,
    NO_COLLECTIVE_WAIT,
    NO_WAIT,
    REUSED,
    SWAPPED,
    Fault,
)
from tests.mutants.harmless_faults import HARMLESS
from tests.mutants.on_device import (
    ERROR,
    HANG,
    LEAST,
    ORDER_CHECK,
    RECORD,
    TABLE,
    WATCH,
    Runner,
    noticed_in,
    table_of,
)
from tests.support.selection import some_and_rest

RECOMPUTATION = 1  # its place among the programs
A_HANDFUL = {
    Fault(NO_WAIT, "reduce: ready[0]"): {WATCH},
    Fault(NO_COLLECTIVE_WAIT, "reduce: collective 0, finish"): {WATCH},
    Fault(EARLY, "gathers.end_use in decisions._drop"): {WATCH},
    Fault(FOREIGN_MEMORY, "zeros, unit._new_buffer in unit._allocate_and_shard"): {WATCH},
    Fault(REUSED, "arena.place_at in gathers.start_gather"): {WATCH},
    # Of two collectives that differ the device says so, where it comes first.
    Fault(SWAPPED, "gather: gathers.start_gather"): {ORDER_CHECK, ERROR},
}


@pytest.mark.parametrize("faults", some_and_rest(A_HANDFUL, [*A_HANDFUL][4:]))
def test_a_fault_of_the_device_path_is_noticed_and_by_whom_it_is_to_be(
    worlds: DeviceWorlds, faults: list[Fault]
):
    runner = Runner(worlds, [RECOMPUTATION])
    for one in runner.try_all(faults):
        assert one.by in A_HANDFUL[one.fault], one


@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("Timeout (0:00:09)!\n  File a\n--- rank 0 ---\ndied without a message", HANG),
        ("emulated device: a writes that b reads, and nothing orders the two", WATCH),
        ("emulated device: no function x\n--- rank 1 ---\nnot finished after 9 s", ERROR),
        ("--- rank 0 ---\nx.OrderMismatch: step 1: collective 3", ORDER_CHECK),
        ("--- rank 0 ---\nRuntimeError: a shape\n--- rank 1 ---\ndied", ERROR),
    ],
)
def test_what_ended_a_run_is_read_from_its_words(text: str, by: str):
    assert noticed_in(f"law none:\n{text}")[0] == by


def test_the_published_table_is_that_of_its_record_of_100_faults_of_every_kind():
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    tried = [row for row in rows if "harmless" not in row]
    assert TABLE.read_text() == table_of(rows)
    assert len({(row["fault"], row["place"]) for row in tried}) == len(tried) >= 100
    assert {row["fault"] for row in tried} == set(KINDS)
    assert sum(bool(row["noticed_by"]) for row in tried) >= LEAST * len(tried)


@pytest.mark.slow
def test_95_of_100_faults_of_the_device_path_are_noticed_and_none_that_is_said_to_be_harmless(
    worlds: DeviceWorlds,
):
    runner = Runner(worlds)
    assert set(runner.faults) >= set(HARMLESS)
    outcomes = {one.fault: one for one in runner.try_all(runner.faults)}
    assert not [outcomes[fault] for fault in HARMLESS if outcomes[fault].by]
    counted = [one for fault, one in outcomes.items() if fault not in HARMLESS]
    missed = [one.fault for one in counted if not one.by]
    assert len(counted) >= 100
    assert len(missed) <= (1 - LEAST) * len(counted), missed
