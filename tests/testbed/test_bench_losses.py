# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""No benchmark of a training step records a run that trained something else: it ends in one line
before it writes. What trains is replaced by its losses here."""

from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.bench import bench_schedules, early_update
from scripts.report.records import read
from scripts.testbed.contenders.workload import RankReport

LOSSES = [4.9, 4.6, 4.4]
BROKEN = [nan, inf]


def losses_with(last: float) -> list[float]:
    return [*LOSSES[:-1], last]


def lines_of(bench: ModuleType, options: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """What the benchmark recorded; SystemExit where it ended in a line."""
    monkeypatch.setattr(bench, "prepare_environment", lambda: None, raising=False)
    monkeypatch.setattr("sys.argv", ["bench", *options.split(), "--out", str(out)])
    bench.main()
    return [line for line in read([out]) if line.get("kind") != "machine"]


def written(out: Path) -> list[dict]:
    lines = read([out]) if out.exists() else []
    return [line for line in lines if line.get("kind") not in ("machine", "floor")]


def ends_in(words: str, *run: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        lines_of(*run)
    message = ended.value.code
    assert isinstance(message, str) and words in message and "\n" not in message


# ---- schedules


def schedules(last: float, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {}
    for name, losses in (("threaded", LOSSES), ("inline", losses_with(last))):
        ideal = bench_schedules.SYSTEMS[name].volume(2, 2, 1)
        nbytes = ideal * bench_schedules.ModelSize(blocks=1).block_nbytes
        results[name] = bench_schedules.Result([1.0], losses, nbytes)
    monkeypatch.setattr(bench_schedules.Cluster, "run", lambda *_, **__: [(results, 0.0)])


OF_SCHEDULES = "--blocks 1 --contenders threaded inline"


def test_schedules_that_learn_the_same_are_recorded(tmp_path, monkeypatch):
    schedules(4.4 * (1 + 9e-6), monkeypatch)
    out = tmp_path / "out.jsonl"
    assert len(lines_of(bench_schedules, OF_SCHEDULES, out, monkeypatch)) == 2


@pytest.mark.parametrize("last", [4.4001, *BROKEN])
def test_schedules_that_learn_something_else_leave_no_record(last, tmp_path, monkeypatch):
    schedules(last, monkeypatch)
    out = tmp_path / "out.jsonl"
    ends_in("inline: losses", bench_schedules, OF_SCHEDULES, out, monkeypatch)
    assert not out.exists()


# ---- early updates


def early(last: float, monkeypatch: pytest.MonkeyPatch, late_last: float = LOSSES[-1]) -> None:
    def train(bed: early_update.Bed, clip_grad: float, *flags: str) -> list[RankReport]:
        losses = losses_with(late_last if "off" in flags else last)
        first = RankReport([None] * len(losses), [1.0])  # of a pipeline, say
        return [first, RankReport(list(losses))]

    monkeypatch.setattr(early_update.Bed, "train", train)
    monkeypatch.setattr(early_update.Bed, "compute", lambda bed: 1.0)


OF_EARLY = "--only fp32 --repetitions 1"


def test_early_updates_with_the_bits_of_late_ones_are_recorded(tmp_path, monkeypatch):
    early(LOSSES[-1], monkeypatch)
    lines = lines_of(early_update, OF_EARLY, tmp_path / "out.jsonl", monkeypatch)
    assert [line.get("update") for line in lines] == [None, *["late", "early"] * 2]


@pytest.mark.parametrize("last", [4.4 + 1e-15, *BROKEN])
def test_an_early_update_with_another_bit_ends_in_a_line_and_leaves_no_record(
    last, tmp_path, monkeypatch
):
    early(last, monkeypatch)
    out = tmp_path / "out.jsonl"
    ends_in("clipped never, early: losses", early_update, OF_EARLY, out, monkeypatch)
    assert [line["update"] for line in written(out)] == ["late"]


@pytest.mark.parametrize("last", BROKEN)
def test_two_broken_runs_are_not_the_same(last, tmp_path, monkeypatch):
    early(last, monkeypatch, last)
    out = tmp_path / "out.jsonl"
    ends_in("clipped never, late: losses", early_update, OF_EARLY, out, monkeypatch)
    assert not written(out)
