# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""No benchmark of a training step records a run that trained something else: it ends in one line
before it writes. What trains is replaced by its losses here."""

from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.bench import bench_schedules
from scripts.report.records import read

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


def ends_in(words: str, *run: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        lines_of(*run)
    message = ended.value.code
    assert isinstance(message, str) and words in message and "\n" not in message


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
