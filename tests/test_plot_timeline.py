# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of a step: what is in it, and one line for a file that is no trace."""

import json
from pathlib import Path

import pytest

from megatron_asynchzp.comm import timeline
from megatron_asynchzp.comm.timeline import CAPTURE, COMPUTE, WAIT, Span, chrome_trace
from scripts.report import plot_timeline
from scripts.report.plot_timeline import COLOURS, make_figure
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


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def bars(axes, colour: str) -> list[tuple[float, float]]:
    """Start and length in ms of the bars of this colour."""
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    return [
        (round(bar.get_x(), 3), round(bar.get_width(), 3))
        for bar in axes.patches
        if isinstance(bar, Rectangle)
        and bar.get_zorder() == 2
        and bar.get_fill()
        and to_hex(bar.get_facecolor()).upper() == colour
    ]


def test_a_panel_shows_rows_units_micro_batches_and_what_was_exposed(tmp_path):
    trace = read_trace(write(tmp_path / "threaded.json", step_spans()))
    (axes,) = make_figure([trace]).axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["main thread", "wait", "gather", "reduce"]
    assert {"0", "1", "2", "backward 1", "backward 2"} <= set(texts(axes))
    assert {"forward 1", "F1"} & set(texts(axes))
    assert axes.get_title(loc="left") == (
        "threaded: step 290.0 ms, exposed communication 10.0 ms, overlap 94 %"
    )
    assert bars(axes, COLOURS["forward"]) == [(100, 10), (110, 10), (120, 10)]
    assert len(bars(axes, COLOURS["gather"])) == len(bars(axes, COLOURS["reduce"])) == 6
    assert bars(axes, COLOURS[WAIT]) == [(280, 10)]


def test_every_lane_that_moves_bytes_has_a_row_a_colour_and_a_meaning(tmp_path):
    moving = [lane for lane in timeline.LANES if lane != "order"]
    spans = [*step_spans(), *(Span(lane, "u", 0.0, 0.1) for lane in moving)]
    figure = make_figure([read_trace(write(tmp_path / "t.json", spans))])
    (axes,) = figure.axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert set(moving) <= set(rows)
    for lane in moving:
        assert (0, 100) in bars(axes, COLOURS[lane])
    (legend,) = figure.legends
    assert len(legend.get_texts()) == len(moving) + 3  # forward, backward, waits


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
