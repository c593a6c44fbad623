# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The planner against measurements of others: constants fitted on one size predict the others."""

from statistics import fmean

import pytest

from scripts.bench.published_errors import ROWS, errors_of, points, summary
from scripts.report import planner_table
from scripts.report.records import read_record


@pytest.mark.parametrize("name", ["internevo", "torchtitan"])
def test_what_was_fitted_on_8_gpus_predicts_more_of_them_within_the_bounds(name):
    file = ROWS / f"{name}.toml"
    lines = errors_of(file)
    assert all(line["ranks"] == 8 for line in lines if line["fitted"])
    of_all = summary(file, lines)
    assert of_all["holds"], of_all
    assert f"{of_all['points']}" in planner_table.markdown([*lines, of_all])


def test_rows_with_a_stated_network_hold_and_alternatives_are_in_the_right_order():
    record = read_record("planner_published").lines
    found = [one for one in record if one["kind"] == "summary"]
    stated = {one["file"] for one in found if one["is_network_stated"]}
    rows = [one for one in record if one["kind"] == "published"]
    errors = [abs(one["error"]) for one in rows if one["file"] in stated and not one["fitted"]]
    assert len(errors) > 130 and fmean(errors) <= 0.05
    pairs, right = (sum(one[name] for one in found) for name in ("pairs", "pairs_right"))
    assert pairs > 40 and right >= 0.9 * pairs
    # Fewer are fitted than are predicted.
    assert 2 * sum(one["fitted"] for one in rows) < sum(not one["fitted"] for one in rows)


def test_the_record_is_what_the_planner_predicts_now():
    record = [one for one in read_record("planner_published").lines if one["kind"] == "published"]
    for name in ("llm_foundry_h100_scale", "kempnerforge", "pith_train"):
        now = errors_of(ROWS / f"{name}.toml")
        was = [one for one in record if one["file"] == name]
        assert [one["predicted"] for one in now] == pytest.approx([one["predicted"] for one in was])


def test_every_file_of_published_rows_says_where_it_is_from_and_what_it_assumes():
    files = sorted(ROWS.glob("*.toml"))
    assert len(files) >= 4
    for file in files:
        every = list(points(file))
        assert len(every) > sum(bool(point.entries.get("fit")) for point in every) > 0
        of_all = summary(file, [{"fitted": False, "error": 0.0}])
        assert of_all["source"] and of_all["assumed"]
