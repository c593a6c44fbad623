# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How the planner is held against the test-bed: what is fitted, measured and judged."""

import pytest

from megatron_asynchzp.sharding.topology import ShardSizes
from scripts.bench.planner_errors import choices, record, summary
from scripts.bench.planner_points import (
    MODELS,
    NETWORKS,
    Host,
    Point,
    fit_points,
    found,
    further_points,
    rivals,
)
from scripts.report import planner_table

HOST = Host(300.0, 400.0, 2000.0, 30_000.0)


def test_a_clusters_points_are_of_several_sizes_and_no_error_of_a_fitted_one_counts():
    judged = set(further_points())
    for network in NETWORKS:
        for model in MODELS:
            sizes = rivals(found(network, model, HOST))
            assert len(set(sizes)) == len(sizes) > 2
            judged |= {Point(network, model, one, model.micro_batches) for one in sizes}
    assert len(judged) >= 24 and len(NETWORKS) * len(MODELS) == 10
    fits = [record(point, [1.0], HOST) for point in fit_points()]
    line = record(next(iter(judged)), [1.0], HOST)
    assert summary([*fits, line], [])["points"] == 1 < len(fits)


def _lines(steps_ms: list[float]) -> list[dict]:
    """Of one case, each predicted at 100 ms."""
    point = Point(NETWORKS[0], MODELS[0], ShardSizes(2, 2, 4), 1)
    lines = [record(point, [1e-3 * ms] * 3, HOST) for ms in steps_ms]
    return [
        line | {"predicted": 100.0, "error": 100.0 / ms - 1, "name": str(index)}
        for index, (line, ms) in enumerate(zip(lines, steps_ms, strict=True))
    ]


def test_a_choice_is_good_within_2_percent_of_the_best_and_errors_have_two_bounds():
    lines = _lines([101.0, 100.0, 104.0])
    (choice,) = choices(lines)
    assert choice["chosen"] == "0" and choice["best"] == "1"
    assert choice["ratio"] == pytest.approx(1.01)
    assert summary(lines, [choice])["holds"]
    assert not summary(lines, choices(_lines([103.0, 100.0])))["holds"]
    assert not summary(_lines([100.0, 100.0, 115.0]), [choice])["holds"]  # the worst
    assert not summary(_lines([107.0, 107.0, 107.0]), [choice])["holds"]  # the mean
    text = planner_table.testbed([*lines, choice, summary(lines, [choice])])
    assert "1.010" in text and "Holds" in text and "-3.8%" in text
