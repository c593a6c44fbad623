# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Of the faults that the device path can have at each of its places nearly all are noticed on the
emulated device, and each that is not is explained."""

import json

import pytest

from scripts.testbed.compiler import CompileError
from tests.mutants.on_device import RECORD, TABLE, Outcome, explain, run_faults, table_of


def test_the_published_table_is_that_of_its_record_and_explains_what_nothing_notices():
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    assert TABLE.read_text() == table_of(rows)
    assert len(rows) >= 100
    assert [row for row in rows if not row["noticed_by"] and not explain(row)] == []


@pytest.mark.slow
def test_every_fault_of_the_device_path_is_noticed_or_explained():
    def is_open(one: Outcome) -> bool:
        return not one.by and not explain({"fault": one.fault.what, "place": one.fault.place})

    try:
        outcomes = run_faults()
    except CompileError as error:
        pytest.skip(f"no emulated device: {error}")
    assert len(outcomes) >= 100
    assert [one.fault for one in outcomes if is_open(one)] == []
