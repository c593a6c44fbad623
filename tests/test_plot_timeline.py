# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of a step: what is in it, and one line for a file that is no trace."""

import json
from pathlib import Path

import pytest

from megatron_asynchzp.engine.comm.timeline import CAPTURE, COMPUTE, WAIT, Span, chrome_trace
from scripts.report import plot_timeline
from scripts.report.step_trace import number_batches, read_trace

LAYERS = [f"decoder.layers.{i}" for i in range(3)]


def step_spans(micro_batches: int = 2, recomputes: bool = False, exposed_s: float = 0.01):
    """A step of three layers within a root, 10 ms a forward, 20 ms a backward."""
    spans, now = [Span(CAPTURE, "step", 0.0, 0.0)], 0.1

    def compute(direction: str, unit: str, seconds: float) -> None:
        nonlocal now
        spans.append(Span(COMPUTE, f"{direction} {unit}", now, now + seconds))
        now += seconds

    for _batch in range(micro_batches):
        begin = now
        for unit in LAYERS:
            spans.append(Span("gather", unit, now - 0.005, now + 0.005))
            compute("forward", unit, 0.01)
        spans.append(Span(COMPUTE, "forward root", begin, now))
        begin = now
        for unit in reversed(LAYERS):
            if recomputes:
                compute("forward", unit, 0.01)
            compute("backward", unit, 0.02)
            spans.append(Span("reduce", unit, now, now + 0.03))
        spans.append(Span(COMPUTE, "backward root", begin, now))
    spans.append(Span(WAIT, "reduce root", now, now + exposed_s))
    spans[0] = Span(CAPTURE, "step", 0.0, now + exposed_s)
    return spans


def write(path: Path, spans: list[Span]) -> Path:
    path.write_text(json.dumps(chrome_trace(spans, rank=0)))
    return path


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_leaves_are_found_and_numbered_by_micro_batch(micro_batches, recomputes, tmp_path):
    trace = read_trace(write(tmp_path / "t.json", step_spans(micro_batches, recomputes)))
    assert {span.name for span in trace.outer} == {"forward root", "backward root"}
    for unit in LAYERS:
        mine = [each for each in trace.computations if each.unit == unit]
        printed = [(each.direction, each.batch, each.is_recomputed) for each in mine]
        expected = []
        for batch in range(micro_batches):
            expected.append(("forward", batch, False))
            expected += [("forward", batch, True)] * recomputes
            expected.append(("backward", batch, False))
        assert printed == expected


def test_in_a_pipeline_forwards_that_run_ahead_keep_their_micro_batch():
    names = ["forward u", "forward u", "backward u", "forward u", "backward u", "backward u"]
    spans = [Span(COMPUTE, name, i, i + 1) for i, name in enumerate(names)]
    assert [each.batch for each in number_batches(spans)] == [0, 1, 0, 2, 1, 2]


NO_STEP = json.dumps(chrome_trace([Span("gather", "u", 0.0, 1.0)], 0))


@pytest.mark.parametrize(
    "content", ["", "no json", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}', NO_STEP, None]
)
def test_a_file_that_is_no_trace_is_one_line_with_the_remedy(content, tmp_path, capsys):
    path = tmp_path / "wrong.json"
    if content is not None:
        path.write_text(content)
    status = plot_timeline.main([str(path), "--output", str(tmp_path / "t.png")])
    printed = capsys.readouterr().err
    assert status == 2
    assert printed.count("\n") == 1 and str(path) in printed and "--asynchzp-trace" in printed
    assert not (tmp_path / "t.png").exists()


def test_a_picture_is_written_or_one_line_has_the_remedy(tmp_path, capsys):
    trace = str(write(tmp_path / "t.json", step_spans()))
    picture = tmp_path / "t.png"
    assert plot_timeline.main([trace, "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    for output, remedy in (
        (tmp_path / "nowhere" / "t.png", "--output"),
        (tmp_path, "--output"),
        (tmp_path / "t.xyz", ".png"),
    ):
        capsys.readouterr()
        assert plot_timeline.main([trace, "--output", str(output)]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and remedy in printed
