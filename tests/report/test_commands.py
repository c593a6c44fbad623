# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tables as commands and every picture, from the published records to the end; and one line for
wrong input."""

import pytest

from scripts.report import compare_front
from scripts.report.__main__ import main
from scripts.report.compare_rows import comparisons
from scripts.report.published import PICTURES, TABLES, draw_picture
from scripts.report.records import append, read_record
from tests.support.selection import slow_unless


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_as_many_cells_in_every_row_as_in_its_head(name, tmp_path, capsys):
    record = TABLES[name].record
    append(tmp_path / "records.jsonl", *read_record(record).lines)
    main([name, str(tmp_path / "records.jsonl")])
    lines = capsys.readouterr().out.splitlines()
    widths = [line.count("|") if line.startswith("|") else 0 for line in lines]
    if not any(widths):
        assert name in AS_A_SENTENCE
    for before, after in zip(widths, widths[1:]):
        assert not before or not after or before == after


AS_A_SENTENCE = ("versions checkpoints", "planner misses")  # all alike; a line for each source


DRAWN = [name for name in PICTURES if PICTURES[name].draw]


@pytest.mark.parametrize("name", [slow_unless(name in DRAWN[:1], name) for name in DRAWN])
def test_a_picture_is_drawn_into_a_png(name, tmp_path):
    draw_picture(name, tmp_path / name)
    picture = (tmp_path / name).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5_000


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["compare"],
        ["compare", "absent.jsonl"],
        ["tables", __file__],
        ["timeline.png", __file__],
    ],
)
def test_a_report_without_its_files_ends_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    output = capsys.readouterr().err.strip().splitlines()[-1]
    assert output.startswith("python -m scripts.report: error: ")


def test_every_measured_contender_has_a_row_with_its_name_and_two_marks():
    records = read_record("compare").lines
    figure = compare_front.figure_of(records)
    studies = [study for study in comparisons(records) if study.has_network]
    panels = zip(figure.axes[::2], figure.axes[1::2], strict=True)
    for study, (times, peaks) in zip(studies, panels, strict=True):
        rows = {row.name.replace("AsyncHZP threaded", "AsyncHZP"): row for row in study.rows}
        names = [text.get_text() for text in times.get_yticklabels()]
        drawn = {name: row for name, row in rows.items() if row.is_timed and row.peak_mb}
        assert names == list(drawn)
        for axes, values in (
            (times, [row.median_ms for row in drawn.values()]),
            (peaks, [row.peak_mb for row in drawn.values()]),
        ):
            marks = [tuple(mark) for group in axes.collections for mark in group.get_offsets()]
            assert sorted(marks, key=lambda mark: mark[1]) == [
                (value, place) for place, value in enumerate(values)
            ]
