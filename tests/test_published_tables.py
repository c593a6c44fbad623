# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tables and records on some measurements: who is on the front, what is refused, what differs."""

import pytest

from scripts.report import compare_front, figures, schedule_grid
from scripts.report.compare_rows import Row
from scripts.report.parity_table import parity_table
from scripts.report.records import RecordsError, read_record


def test_the_front_has_whom_nobody_beats_in_both_time_and_memory():
    points = {"slow": (9, 1), "beaten": (9, 2), "middle": (5, 3), "fast": (4, 8), "large": (4, 9)}
    rows = [Row(name, "", step_ms=(ms,), peak_mb=mb) for name, (ms, mb) in points.items()]
    assert [row.name for row in compare_front.front(rows)] == ["slow", "middle", "fast"]


def test_a_network_without_its_floors_is_refused_in_one_line():
    lines = read_record("schedules").lines
    without = [line for line in lines if line["contender"] != "communication only"]
    with pytest.raises(RecordsError, match="'communication only' was not measured"):
        schedule_grid.grids(without)


def test_a_comparison_beyond_its_bound_counts_as_different():
    good = {"variant": "bf16", "ranks": 4, "steps": 20, "tolerance": 1e-3, "faults": []}
    good |= {"loss_error": 1e-4, "grad_norm_error": 2e-4}
    bad = [good | {"grad_norm_error": 2e-3}, good | {"loss_error": float("nan")}]
    assert parity_table([good]).splitlines()[2].endswith("| 1.0e-03 | 0 |")
    assert (
        parity_table([good, *bad])
        .splitlines()[2]
        .endswith("| nan | 1.0e-03 | 2.0e-03 | 1.0e-03 | 2 |")
    )


def test_a_figure_that_a_test_sets_is_one_that_the_test_has(tmp_path):
    source = tmp_path / "test_it.py"
    source.write_text("kills(30, seed=1)  # within 2% of 1.5\nBOUND = 1e-5\n")
    for text in ("30", "2%", "1.5", "1e-5"):
        assert figures.stated(str(source), text) == text
    for text in ("3", "5", "2", "1.50", "1e-6", "31"):
        with pytest.raises(LookupError, match=f"does not have {text}"):
            figures.stated(str(source), text)
