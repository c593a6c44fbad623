# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of attention has no time where accuracy is red."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from scripts.bench import bench_attention as bench

# fmt: off
_SMALL = ["--lengths", "128", "--heads", "2", "--groups", "1", "--head-dim", "32",
          "--dtype", "fp16", "--repetitions", "1", "--device", "cpu"]
# fmt: on


def _lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_way_there_is_is_measured(capsys, tmp_path):
    out = tmp_path / "lines.jsonl"
    assert bench.main([*_SMALL, "--causal", "--out", str(out)]) == 0
    lines = _lines(capsys.readouterr().out)
    assert lines == _lines(out.read_text())
    names = ["sdpa", "sdpa + shift", "block (reference)"]
    assert [line["way"] for line in lines] == names
    assert all(line["is_right"] and line["forward_tflops"] > 0 for line in lines)
    by_name = {line["way"]: line["errors_at_k_bias_10"]["dQ"] for line in lines}
    assert by_name["sdpa"] > 5 * by_name["sdpa + shift"]


def _wrong_gradient(name: str, factor: float) -> Callable[[bench.AttentionCall], torch.Tensor]:
    """Attention with the right output, and this gradient times `factor`; or the output itself."""
    vendor = bench.VENDORS[-1]

    def run(call: bench.AttentionCall) -> torch.Tensor:
        if name == "output":
            return factor * vendor.run(call)
        leaf = getattr(call, name)
        seen = leaf * 1
        seen.register_hook(lambda grad: factor * grad)
        return vendor.run(replace(call, **{name: seen}))

    return run


@pytest.mark.parametrize("name", ["output", "q_BHSD", "k_BGTD", "v_BGTE"])
@pytest.mark.parametrize("has_shift", [True, False])
@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_no_wrong_output_or_gradient_gets_a_time(name, has_shift, factor, capsys, monkeypatch):
    """But dQ without a shift, which is known to be inaccurate, and must only be finite."""
    wrong = bench.Way("wrong", has_shift, _wrong_gradient(name, factor))
    monkeypatch.setattr(bench, "ways", lambda call: [wrong])
    is_known = name == "q_BHSD" and not has_shift and factor == 1.01
    assert bench.main([*_SMALL, "--dtype", "fp32"]) == (0 if is_known else 1)
    (line,) = _lines(capsys.readouterr().out)
    assert line["is_right"] == is_known
    assert bool([key for key in line if key.endswith(("_s", "tflops"))]) == is_known
