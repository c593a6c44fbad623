# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Every table and every picture, from a few records to the end; and one line for wrong input."""

import runpy
import sys
from pathlib import Path

import pytest

from scripts.bench.grad_wire import verdicts
from scripts.report import loss_picture, records
from scripts.report.parity_table import shrunk_table
from tests.report import records as made_up

TABLES = {
    "compare_table": made_up.compare_records,
    "schedule_grid": made_up.schedule_records,
    "checkpoint_table": made_up.checkpoint_records,
    "parity_table": made_up.parity_records,
    "wire_table": made_up.wire_records,
}
PICTURES = {
    "compare_picture": made_up.compare_records,
    "compare_front": made_up.compare_records,
    "schedule_bars": made_up.schedule_records,
}


def run(monkeypatch, name: str, *options: str) -> None:
    """As `python -m scripts.report.NAME options`."""
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.delitem(sys.modules, f"scripts.report.{name}", raising=False)
    runpy.run_module(f"scripts.report.{name}", run_name="__main__")


@pytest.fixture
def file_of(tmp_path):
    def write(made: list[dict]) -> str:
        records.append(tmp_path / "made" / "records.jsonl", *made)
        return str(tmp_path / "made" / "records.jsonl")

    return write


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_as_many_cells_in_every_row_as_in_its_head(name, file_of, monkeypatch, capsys):
    run(monkeypatch, name, file_of(TABLES[name]()))
    lines = capsys.readouterr().out.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("|---")]
    assert heads or any(line.startswith("|---:|") for line in lines)
    widths = [line.count("|") if line.startswith("|") else 0 for line in lines]
    for before, after in zip(widths, widths[1:]):
        assert not before or not after or before == after
    assert any("1000" in line or "1.0" in line or "400" in line for line in lines)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_into_a_png(name, file_of, tmp_path, monkeypatch):
    picture = tmp_path / "picture.png"
    run(monkeypatch, name, file_of(PICTURES[name]()), "--output", str(picture))
    assert_is_png(picture)


def test_the_picture_of_two_losses_is_drawn_into_a_png(tmp_path):
    state = dict.fromkeys(loss_picture.STATES, 1 << 20)
    runs = [loss_picture.Run(name, [3.0, 2.5, 2.0], state) for name in ("DDP", "AsyncHZP, P=2")]
    loss_picture.draw(*runs, "title", tmp_path / "loss.png")
    assert_is_png(tmp_path / "loss.png")


def assert_is_png(file: Path) -> None:
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5_000


@pytest.mark.parametrize("name", [*TABLES, *PICTURES])
@pytest.mark.parametrize("options", [[], ["absent.jsonl", "--output", "p.png"]])
def test_a_report_without_its_files_ends_in_one_line(name, options, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, name, *options)
    assert ended.value.code == 2
    output = capsys.readouterr().err.strip().splitlines()[-1]
    assert output.startswith(f"python -m scripts.report.{name}: error: ")


def test_a_shrunk_model_has_a_row_with_the_worst_of_all_sizes_and_numbers_of_ranks():
    rows = shrunk_table(made_up.shrunk_records()).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells == [["a model", "3", "2.0e-06", "2.0e-07", "0.0e+00", "3.0e-07", "1.0e-06", "1"]]


def _verdicts(changes: dict[int, dict]) -> list[bool]:
    """The verdicts of the benchmark of gradients in bf16 on made-up records; changes: by line."""
    lines = made_up.wire_records()
    for index, change in changes.items():
        lines[index] = lines[index] | change
    return [is_met for is_met, _ in verdicts(lines)]


def test_gradients_in_bf16_must_end_within_two_seeds_and_be_faster():
    assert _verdicts({}) == [True, True]
    assert _verdicts({2: {"last": 1.02}}) == [False, True]
    assert _verdicts({2: {"last": float("nan")}}) == [False, True]
    assert _verdicts({3: {"last": 6.0}}) == [False, True]  # a seed that learned nothing
    assert _verdicts({5: {"step_ms": [1300.0] * 3}}) == [True, False]
    assert _verdicts({5: {"step_ms": [1300.0] * 3, "foreign": 0.9}}) == [True, True]
