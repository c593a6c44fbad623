# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The planner against measurements of others: constants fitted on one size predict the others."""

import pytest

from scripts.bench.published_errors import ROWS, errors_of, points, summary
from scripts.report import planner_table


@pytest.mark.parametrize("name", ["internevo", "torchtitan"])
def test_what_was_fitted_on_8_gpus_predicts_more_of_them_within_the_bounds(name):
    file = ROWS / f"{name}.toml"
    lines = errors_of(file)
    assert all(line["ranks"] == 8 for line in lines if line["fitted"])
    of_all = summary(file, lines)
    assert of_all["holds"], of_all
    assert f"{of_all['points']}" in planner_table.markdown([*lines, of_all])


def test_every_file_of_published_rows_says_where_it_is_from_and_what_it_assumes():
    files = sorted(ROWS.glob("*.toml"))
    assert len(files) >= 4
    for file in files:
        every = list(points(file))
        assert len(every) > sum(bool(point.entries.get("fit")) for point in every) > 0
        of_all = summary(file, [{"fitted": False, "error": 0.0}])
        assert of_all["source"] and of_all["assumed"]
