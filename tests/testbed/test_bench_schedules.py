# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the schedules on a toy: every contender learns the same and sends the ideal
volume, or there is no table."""

import pytest

from scripts.bench import bench_schedules
from scripts.report.records import read
from scripts.testbed.contenders.systems import SYSTEMS

ENGINES = [name for name in SYSTEMS if name.split(",")[0] in ("threaded", "main-thread", "inline")]
# fmt: off
TOY = [
    "--hidden", "128", "--blocks", "3", "--rows", "4", "--block-ms", "0",
    "--repetitions", "1", "--steps", "1", "--profile", "unlimited",
]
# fmt: on


@pytest.mark.slow  # test_contenders.py and test_trainers.py hold each kind fast
def test_every_contender_learns_the_same_and_sends_the_ideal_volume(tmp_path, monkeypatch, capsys):
    """In this process: one of its own would import Megatron for ranks that do not need it."""
    files = ["--out", str(tmp_path / "out.jsonl"), "--traces", str(tmp_path / "traces")]
    monkeypatch.setattr(bench_schedules.sys, "argv", ["bench", *TOY, "--nodes", "2", *files])
    bench_schedules.main()
    output = capsys.readouterr().out
    assert "threaded" in output and "others used" in output
    records = read([tmp_path / "out.jsonl"])
    losses = {r["contender"]: r["losses"] for r in records if r["trains"]}
    assert len(losses) == len(SYSTEMS) - 3 and len(ENGINES) == 12
    for record in records:
        assert record["volume"] == pytest.approx(record["ideal_volume"], rel=0.01)
        assert record["median_ms"] > 0 and record["torch"] and "--hidden" in record["command"]
    volumes = {r["contender"]: r["ideal_volume"] for r in records}
    assert (volumes["ddp"], volumes["fsdp2 kept"], volumes["hsdp"]) == (1.5, 1.5, 1.0)
    assert volumes["fsdp2"] == pytest.approx(2.25 - 0.75 / 3)  # the last of three blocks is kept
    ours = [losses[name] for name in ENGINES]
    assert all(other == ours[0] for other in ours)
    (machine, *traces) = read([tmp_path / "traces" / "timeline.jsonl"])
    assert machine["kind"] == "machine"
    assert [trace["name"] for trace in traces] == [
        name for name in SYSTEMS if name in (*ENGINES, "communication only", "early and clipped")
    ]
