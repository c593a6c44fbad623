# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the schedules on a toy: every contender learns the same and sends the ideal
volume, or there is no table.
"""

import json

import pytest

from scripts.bench import bench_schedules
from scripts.bench.bench_schedules import parse_args
from scripts.report import schedule_bars
from scripts.report.published import PICTURES
from scripts.report.records import read as records_of
from scripts.report.records import split
from scripts.testbed.contenders.schedules import CONTENDERS

ENGINES = [
    name for name in CONTENDERS if name.split(",")[0] in ("threaded", "main-thread", "inline")
]
# fmt: off
TOY = [
    "--hidden", "128", "--blocks", "3", "--rows", "4", "--block-ms", "0",
    "--repetitions", "1", "--steps", "1", "--profile", "unlimited",
]
# fmt: on


def test_every_contender_learns_the_same_and_sends_the_ideal_volume(tmp_path, monkeypatch, capsys):
    """In this process: one of its own would import Megatron for ranks that do not need it."""
    traces = tmp_path / "traces"
    command = ["bench", *TOY, "--nodes", "2", "--out", str(tmp_path / "out.jsonl")]
    command += ["--traces", str(traces)]
    monkeypatch.setattr(bench_schedules.sys, "argv", command)
    bench_schedules.main()
    output = capsys.readouterr().out
    assert "threaded" in output and "others used" in output
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    losses = {r["contender"]: r["losses"] for r in records if r["trains"]}
    assert len(losses) == len(CONTENDERS) - 2 and len(ENGINES) == 12
    for record in records:
        assert record["volume"] == pytest.approx(record["ideal_volume"], rel=0.01)
        assert record["median_ms"] > 0 and record["torch"] and "--hidden" in record["command"]
    volumes = {r["contender"]: r["ideal_volume"] for r in records}
    assert (volumes["ddp"], volumes["fsdp2 kept"], volumes["hsdp"]) == (1.5, 1.5, 1.0)
    assert volumes["fsdp2"] == pytest.approx(2.25 - 0.75 / 3)  # the last of three blocks is kept
    ours = [losses[name] for name in ENGINES]
    assert all(other == ours[0] for other in ours)
    schedule_bars.draw(records, tmp_path / "bars.png")  # every system has a colour
    timeline = records_of([traces / "timeline.jsonl"])
    assert timeline[0]["kind"] == "machine"
    assert [trace["name"] for trace in timeline[1:]] == [
        name for name in CONTENDERS if name in ENGINES or name == "communication only"
    ]
    some = split(timeline)
    PICTURES["timeline.png"].draw(some._replace(lines=some.lines[1:4]), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    "options, output",
    [
        (["--contenders", "zero-9"], "--contenders zero-9: not one of compute only"),
        (["--profile", "pigeons"], "network profile 'pigeons' is not one of unlimited"),
        (["--repetitions", "0"], "--repetitions must be at least 1"),
        (["--inter-gbit", "0"], "--inter-gbit must be above 0"),
    ],
)
def test_a_wrong_option_is_one_clear_line(options, output, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(options)
    assert ended.value.code == 2
    assert output in capsys.readouterr().err.strip().splitlines()[-1]
