# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the CPU platform computes itself: the state space of Mamba layers, and norms."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_asynchzp.cpu_platform.norms import torch_norm
from megatron_asynchzp.cpu_platform.state_space import GroupNorm, scan, split_convolve_scan

BATCH, LENGTH, HEADS, WIDTH, STATE, GROUPS, TAPS = 2, 13, 4, 3, 5, 2, 4
INNER, CHANNELS = HEADS * WIDTH, HEADS * WIDTH + 2 * GROUPS * STATE


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _recurrence(x, dt, A, B, C) -> torch.Tensor:
    """The definition, one step after the other."""
    state, outputs = torch.zeros(BATCH, HEADS, WIDTH, STATE, dtype=x.dtype), []
    for t in range(LENGTH):
        fed = torch.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], B[:, t])
        state = (dt[:, t] * A).exp()[..., None, None] * state + fed
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("chunk", [1, 4, LENGTH, 64])
def test_a_scan_in_chunks_is_the_recurrence_in_value_and_gradient(chunk):
    torch.manual_seed(0)
    shapes = [(HEADS, WIDTH), (HEADS,), (HEADS, STATE), (HEADS, STATE)]
    x, dt, B, C = (_drawn(BATCH, LENGTH, *shape) for shape in shapes)
    inputs = [x, F.softplus(dt), -_drawn(HEADS).exp(), B, C]
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    expected, found = _recurrence(*inputs), scan(*inputs, chunk)
    torch.testing.assert_close(found, expected)
    weights = _drawn(*expected.shape)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), inputs), wanted)


def _packed_inputs() -> list[torch.Tensor]:
    torch.manual_seed(1)
    packed = torch.randn(BATCH, LENGTH, 2 * INNER + 2 * GROUPS * STATE + HEADS)
    weight, bias = torch.randn(CHANNELS, TAPS), torch.randn(CHANNELS)
    return [packed, weight, bias, torch.randn(HEADS), -torch.rand(HEADS), torch.randn(HEADS)]


def _convolved_scan(inputs: list[torch.Tensor], **options) -> torch.Tensor:
    common = {"activation": "silu", "headdim": WIDTH, "ngroups": GROUPS}
    return split_convolve_scan(*inputs, 8, **(common | options))


def test_the_convolution_the_skip_and_the_gate_are_those_of_the_definition():
    inputs = _packed_inputs()
    packed, weight, bias, dt_bias, A, D = inputs
    gate, mixed, dt = packed.split([INNER, CHANNELS, HEADS], dim=-1)
    convolved = torch.zeros_like(mixed)
    for t in range(LENGTH):
        for tap in range(TAPS):
            if (source := t - (TAPS - 1) + tap) >= 0:
                convolved[:, t] += weight[:, tap] * mixed[:, source]
    x, B, C = F.silu(convolved + bias).split([INNER, GROUPS * STATE, GROUPS * STATE], dim=-1)
    x = x.reshape(BATCH, LENGTH, HEADS, WIDTH)
    # Head h belongs to group h // (heads of a group).
    B, C = (part.reshape(BATCH, LENGTH, GROUPS, STATE)[:, :, [0, 0, 1, 1]] for part in (B, C))
    y = _recurrence(x, F.softplus(dt + dt_bias), A, B, C) + D[:, None] * x
    torch.testing.assert_close(_convolved_scan(inputs), y.flatten(2) * F.silu(gate))


def test_what_the_scan_cannot_do_is_refused():
    for options in ({"activation": "gelu"}, {"seq_idx": torch.zeros(1)}):
        with pytest.raises(NotImplementedError, match="Mamba on the CPU platform"):
            _convolved_scan(_packed_inputs(), **options)


def test_the_norm_of_groups_gives_each_group_a_mean_square_of_one():
    norm = GroupNorm(12, eps=0.0, group_size=4, norm_before_gate=False, device="cpu")
    with torch.no_grad():
        norm.weight[:4] = 3.0
    squares = norm(torch.randn(5, 12)).unflatten(-1, (3, 4)).square().mean(-1)
    torch.testing.assert_close(squares, torch.tensor([9.0, 1.0, 1.0]).expand(5, 3))


def _norm(kind: str, **config) -> nn.Module:
    plain = {"layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    return torch_norm(object, SimpleNamespace(normalization=kind, **(plain | config)), 6, 1e-5)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_zero_centred_norm_is_the_plain_one_whose_weight_is_one_more(kind):
    plain, centred = _norm(kind), _norm(kind, layernorm_zero_centered_gamma=True)
    weight = torch.randn(6)
    with torch.no_grad():
        plain.weight.copy_(1.0 + weight)
        centred.weight.copy_(weight)
    x = torch.randn(4, 6)
    torch.testing.assert_close(centred(x), plain(x))
    assert {name for name, _ in centred.named_parameters()} == {
        name for name, _ in plain.named_parameters()
    }


@pytest.mark.parametrize("is_parallel", [False, True])
def test_every_parameter_of_a_norm_says_whether_its_gradient_is_summed_over_a_split_sequence(
    is_parallel,
):
    norm = _norm("LayerNorm", sequence_parallel=is_parallel)
    assert [param.sequence_parallel for param in norm.parameters()] == [is_parallel] * 2


def test_a_norm_that_torch_has_not_is_refused():
    with pytest.raises(ValueError, match="L2Norm is not available"):
        _norm("L2Norm")
