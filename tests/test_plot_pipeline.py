# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The picture of a pipeline: phases, bubbles; one line for a wrong file."""

import json

import pytest

from megatron_asynchzp.engine.comm.timeline import CAPTURE, COMPUTE, WAIT, Span, chrome_trace
from scripts.report import plot_pipeline
from scripts.report.plot_pipeline import chunk_of, idle_share, phases
from scripts.report.step_trace import read_trace

F0, B0 = "forward decoder.layers.0", "backward decoder.layers.0"
F1, B1 = "forward chunk1.decoder.layers.0", "backward chunk1.decoder.layers.0"


def write(path, began_s: float, *computed: tuple[str, float, float]):
    spans = [Span(CAPTURE, "step", 0.0, 1.0), Span(WAIT, "gather", 0.9, 1.0)]
    spans += [Span(COMPUTE, *one) for one in computed]
    path.write_text(json.dumps(chrome_trace(spans, 0, began_s)))
    return path


@pytest.fixture
def stages(tmp_path):
    first = (F0, 0.0, 0.1), (F0, 0.1, 0.2), (F1, 0.2, 0.3), (B1, 0.5, 0.6)
    first = *first, (B0, 0.6, 0.7), (B0, 0.7, 0.8)
    second = (F0, 0.1, 0.2), (B0, 0.3, 0.5)
    return [
        write(tmp_path / "t.json", 100.0, *first),
        write(tmp_path / "t.stage1.json", 100.25, *second),
    ]


def test_a_phase_is_what_one_chunk_computes_of_one_micro_batch(stages):
    found = phases(read_trace(stages[0]).computations)
    assert [phase[:3] for phase in found] == [
        ("forward", 0, 0),
        ("forward", 0, 1),
        ("forward", 1, 0),
        ("backward", 1, 0),
        ("backward", 0, 0),
        ("backward", 0, 1),
    ]
    assert chunk_of("chunk1.decoder.layers.0") == 1 and chunk_of("chunked.layers.0") == 0


def test_what_is_neither_computed_nor_waited_for_is_idle(stages):
    assert [round(idle_share(read_trace(path)), 6) for path in stages] == [0.3, 0.6]


def test_the_command_writes_a_png_or_names_the_wrong_file(stages, tmp_path, capsys):
    picture = tmp_path / "p.png"
    assert plot_pipeline.main([*map(str, stages), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "no.json").write_text("{}")
    wrong = [str(tmp_path / "no.json"), "--output", str(picture)]
    assert plot_pipeline.main(wrong) == 2
    assert capsys.readouterr().err.count("\n") == 1
