# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tables as commands and every picture, from the published records to the end; and one line for
wrong input."""

import runpy
import sys

import pytest

from scripts.report.published import PICTURES, draw_picture
from scripts.report.records import append, read_record
from tests.support.selection import slow_unless

TABLES = {"compare_table": "compare", "schedule_grid": "schedules", "parity_table": "parity"}


def run(monkeypatch, name: str, *options: str) -> None:
    """As `python -m scripts.report.NAME options`."""
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.delitem(sys.modules, f"scripts.report.{name}", raising=False)
    runpy.run_module(f"scripts.report.{name}", run_name="__main__")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_as_many_cells_in_every_row_as_in_its_head(name, tmp_path, monkeypatch, capsys):
    append(tmp_path / "records.jsonl", *read_record(TABLES[name]).lines)
    run(monkeypatch, name, str(tmp_path / "records.jsonl"))
    lines = capsys.readouterr().out.splitlines()
    widths = [line.count("|") if line.startswith("|") else 0 for line in lines]
    assert sum(map(bool, widths)) > 3
    for before, after in zip(widths, widths[1:]):
        assert not before or not after or before == after


DRAWN = [name for name in PICTURES if PICTURES[name].draw]


@pytest.mark.parametrize("name", [slow_unless(name in DRAWN[:2], name) for name in DRAWN])
def test_a_picture_is_drawn_into_a_png(name, tmp_path):
    draw_picture(name, tmp_path / name)
    picture = (tmp_path / name).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5_000


@pytest.mark.parametrize("name", ["compare_table", "compare_picture"])
@pytest.mark.parametrize("options", [[], ["absent.jsonl", "--output", "p.png"]])
def test_a_report_without_its_files_ends_in_one_line(name, options, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, name, *options)
    assert ended.value.code == 2
    output = capsys.readouterr().err.strip().splitlines()[-1]
    assert output.startswith(f"python -m scripts.report.{name}: error: ")
