# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The table of steps on the emulated device."""

from scripts.report.device_table import device_table

LINE = {
    "kind": "step",
    "model": {"blocks": 6},
    "sizes": [2, 2, 4],
    "queues": 1,
    "in_order": True,
    "synchronizes": False,
    "step_ms": 11.0,
    "floor_ms": 10.0,
}


def test_a_contender_that_computes_something_else_has_no_speed():
    right = LINE | {"contender": "a", "is_right": True}
    wrong = LINE | {"contender": "b", "is_right": False}
    row = device_table([right, wrong]).splitlines()[-1]
    assert row.endswith("| 1.10 | wrong losses |")
