# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The diagnosis finds what is there: bias, resonance, overflow, and the error of dQ it predicts is
the one that a flash attention has."""

import json

import pytest
import torch
from torch import nn

from megatron_asynchzp.attention import inspect
from megatron_asynchzp.attention.capture import capture_when, capturing
from megatron_asynchzp.attention.diagnosis import diagnose
from megatron_asynchzp.attention.mask import AttentionMask
from scripts.testbed.attention.exact import exact_backward
from scripts.testbed.attention.paper_data import normal_inputs, relative_rmse
from tests.attention.cases import resonant_inputs
from tests.attention.test_accuracy import gradients, unshifted


def test_unbiased_keys_need_nothing():
    inputs = normal_inputs(AttentionMask(128, 128), heads=4, groups=2, dim=64)
    found = diagnose(inputs.q.half(), inputs.k.half())
    assert [one.head for one in found] == [0, 1]
    for one in found:
        assert one.sequence_bias < 0.2 and abs(one.resonance) < 0.1
        assert not one.needs_pasa and one.amplification == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("sign", [1, -1])
def test_resonance_is_reported_with_its_sign_and_overflow_with_what_is_left_of_it(sign):
    inputs = resonant_inputs(sign, 128)
    (one,) = diagnose(inputs.q.half(), inputs.k.half())
    assert one.resonance * sign > 0.95
    assert one.overflows and one.largest_score > 65504 and one.needs_pasa
    assert not one.overflows_shifted and one.sequence_bias_shifted < 0.2


@pytest.mark.parametrize("bias", [10.0, 30.0])
def test_the_predicted_error_of_dq_is_the_one_that_is_measured(bias):
    mask = AttentionMask(384, 384)
    drawn = normal_inputs(mask, dim=128, heads=2, groups=1)
    errors = {}
    for at in (0.0, bias):
        inputs = drawn._replace(k=drawn.k + at).to(torch.float16)
        q, k, v, d_output = inputs
        true = exact_backward(d_output, q, k, v, mask, 128**-0.5).dq_BHSD
        errors[at] = relative_rmse(gradients(inputs, unshifted(k), mask).dq_BHSD, true)
    (one,) = diagnose(inputs.q, inputs.k)
    assert one.amplification == pytest.approx(errors[bias] / errors[0.0], rel=0.5)
    assert one.amplification_shifted == pytest.approx(1, abs=0.02)


class _Core(nn.Module):
    def forward(self, q, k, v, mask):
        return q.flatten(2)


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.core_attention = _Core()

    def forward(self, q, k):
        return self.core_attention(q, k, k, None)


def test_hooks_take_q_and_k_of_every_layer_and_leave_nothing_behind(tmp_path):
    model = nn.ModuleList([_Layer(), _Layer()])
    q, k = torch.randn(5, 2, 4, 8), torch.randn(6, 2, 2, 8)
    with capturing(model) as seen:
        for layer in model:
            layer(q, k)
    model[0](2 * q, k)
    assert list(seen) == [0, 1]
    assert torch.equal(seen[0]["q"], q.permute(1, 2, 0, 3))
    assert torch.equal(seen[1]["k"], k.permute(1, 2, 0, 3))
    torch.save(seen, tmp_path / "qk.pt")
    assert inspect.main([str(tmp_path / "qk.pt")]) == 0


def test_one_step_is_captured_once_under_the_names_of_the_layers():
    model = nn.ModuleDict({"first": _Layer(), "second": _Layer()})
    q, k = torch.randn(5, 2, 4, 8), torch.randn(6, 2, 2, 8)
    step, got = [0], []
    assert capture_when(model, lambda: step[0] == 1, got.append) == 2
    for step[0] in (0, 1, 1, 2):  # two micro-batches in step 1
        for layer in model.values():
            layer((step[0] + 1) * q, k)
    (seen,) = got
    assert list(seen) == ["first", "second"]
    assert torch.equal(seen["second"]["q"], 2 * q.permute(1, 2, 0, 3))
    assert not any(layer.core_attention._forward_pre_hooks for layer in model.values())


def test_the_command_line_prints_what_needs_it_and_writes_figures_and_a_picture(tmp_path, capsys):
    inputs = resonant_inputs(1, 64).to(torch.float16)
    path, lines, picture = (tmp_path / name for name in ("qk.pt", "qk.jsonl", "qk.png"))
    names = ("layers.10.self_attention", "layers.2.self_attention")
    torch.save({name: {"q": inputs.q, "k": inputs.k} for name in names}, path)
    assert inspect.main([str(path), "--json", str(lines), "--picture", str(picture)]) == 1
    output = capsys.readouterr().out
    assert "2 of 2 heads need it" in output and "overflow" in output
    assert [line.split()[0] for line in output.splitlines()[1:3]] == [names[1], names[0]]
    figures = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [one["layer"] for one in figures] == [names[1], names[0]]
    assert all(one["overflows"] and not one["overflows_shifted"] for one in figures)
    assert picture.stat().st_size > 1000


def _broken(name: str, value: float) -> dict:
    generator = torch.Generator().manual_seed(1)
    qk = {one: torch.randn(1, 2, 64, 8, generator=generator) for one in ("q", "k")}
    qk[name][0, 1, 2, 3] = value
    return {0: qk}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k"])
def test_what_holds_inf_or_nan_fits_nowhere(tmp_path, capsys, name, value):
    (broken,) = _broken(name, value).values()
    assert [one.needs_pasa for one in diagnose(broken["q"], broken["k"])] == [False, True]
    torch.save({"layers.7": broken}, tmp_path / "qk.pt")
    assert inspect.main([str(tmp_path / "qk.pt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"layer layers.7 has inf or NaN in {name}" in line


_UNEQUAL = {"q": torch.zeros(1, 3, 4, 8), "k": torch.zeros(1, 2, 4, 8)}
_NO_CAPTURES = [{}, {0: 1}, {0: {"q": torch.zeros(2, 3)}}, {0: _UNEQUAL}]


@pytest.mark.parametrize("content", [None, b"", b"a file", b"PK\x03\x04", b"{}", *_NO_CAPTURES])
def test_a_file_that_is_not_one_is_refused_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "qk.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert inspect.main([str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
