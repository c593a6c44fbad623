# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Shifted keys handed to torch's attention; calls to attentions that are not here are recorded."""

from math import sqrt
from types import SimpleNamespace

import pytest
import torch

from megatron_asynchzp.attention import vendors
from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences
from megatron_asynchzp.attention.pasa import choose_vendor, delegate_attention
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.attention.exact import exact_forward
from scripts.testbed.attention.paper_data import Inputs, normal_inputs, relative_rmse
from tests.attention.cases import (
    cumulative,
    exact,
    growth_of_dq_error,
    largest_error,
    masks,
    with_garbage,
)

SCALE = 0.21
MASKS = masks()


def through_autograd(inputs: Inputs, mask: AttentionMask, scale=SCALE, **options):
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    output = delegate_attention(AttentionCall(*leaves, mask, scale), **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs.d_output)]


@pytest.mark.parametrize("shifts_values", [False, True])
@pytest.mark.parametrize("heads, groups", [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", MASKS)
def test_in_fp64_it_is_softmax_attention_and_its_gradients(name, heads, groups, shifts_values):
    mask = MASKS[name]
    drawn = normal_inputs(mask, heads=heads, groups=groups, dim=24, value_dim=16)
    inputs = drawn._replace(k=drawn.k + 3, v=drawn.v + 5)
    output, _lse, *gradients = exact(inputs, mask, SCALE)
    found, true = through_autograd(inputs, mask, shifts_values=shifts_values), [output, *gradients]
    assert max(largest_error(f, t) for f, t in zip(found, true, strict=True)) < 1e-10


@pytest.mark.parametrize("name", ["padding", "packed, padded"])
def test_padding_may_hold_anything(name):
    mask = MASKS[name]
    clean = normal_inputs(mask)
    dirty = with_garbage(clean, mask, float("inf"))
    for shifts_values in (False, True):
        found = through_autograd(dirty, mask, shifts_values=shifts_values)
        true = through_autograd(clean, mask, shifts_values=shifts_values)
        assert all(torch.equal(f, t) for f, t in zip(found, true, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torchs_dq_depends_on_the_bias_of_k_and_ours_does_not(dtype):
    mask = AttentionMask(256, 256, is_causal=True)

    def by_torch(inputs: Inputs, scale: float) -> torch.Tensor:
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        output = vendors.Sdpa().run(AttentionCall(*leaves, mask, scale))
        return torch.autograd.grad(output, leaves, inputs.d_output)[0]

    def by_us(inputs: Inputs, scale: float) -> torch.Tensor:
        return through_autograd(inputs, mask, scale)[1]

    assert growth_of_dq_error(by_us, mask, dtype, dim=64, groups=2) <= 1.5
    assert growth_of_dq_error(by_torch, mask, dtype, dim=64, groups=2) >= 20


def test_with_shifted_values_the_gradients_do_not_depend_on_the_bias_of_v_either():
    mask, scale = AttentionMask(256, 256), 1 / sqrt(64)
    drawn = normal_inputs(mask, dim=64, groups=2)
    inputs = drawn._replace(k=drawn.k + 10, v=drawn.v + 30).to(torch.float16)
    _output, _lse, dq, dk, _dv = exact(inputs, mask, scale)
    keys_only = through_autograd(inputs, mask, scale)
    both = through_autograd(inputs, mask, scale, shifts_values=True)
    for index, gradient in ((1, dq), (2, dk)):
        assert relative_rmse(both[index], gradient) < 6e-4
        assert relative_rmse(keys_only[index], gradient) > 5 * relative_rmse(both[index], gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_vendor_gets_keys_and_values_from_which_one_vector_was_taken_without_rounding(
    dtype, monkeypatch
):
    """Keys in the binade of the largest one, and smaller ones that pull the mean out of it."""
    mask, generator = AttentionMask(64, 64), torch.Generator().manual_seed(3)

    def drawn() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (2, 2, 64, 16)
        is_large = torch.rand(shape, generator=generator) < torch.linspace(0.3, 1, 16)
        large = 1 + torch.rand(shape, generator=generator)
        small = 0.1 * torch.randn(shape, generator=generator)
        sizes = torch.tensor([-3.0, 1.0])[:, None, None]  # of each head
        return (torch.where(is_large, large, small) * 2.0**sizes).to(dtype), is_large

    (keys, is_large_key), (values, is_large_value) = drawn(), drawn()
    seen: list[AttentionCall] = []
    run = vendors.Sdpa.run

    def run_noted(self: vendors.Sdpa, call: AttentionCall) -> torch.Tensor:
        seen.append(call)
        return run(self, call)

    monkeypatch.setattr(vendors.Sdpa, "run", run_noted)
    delegate_attention(AttentionCall(keys, keys, values, mask, 1.0), "sdpa", shifts_values=True)
    for whole, is_large, shifted in (
        (keys, is_large_key, seen[0].k_BGTD),
        (values, is_large_value, seen[0].v_BGTE),
    ):
        taken = whole.double() - shifted.double()
        low = taken.where(is_large, torch.inf).amin(2)
        assert torch.equal(low, taken.where(is_large, -torch.inf).amax(2))
        assert (low > 0.25).double().mean() > 0.4  # half of the heads are small


@pytest.mark.parametrize("shifts_values", [False, True])
def test_an_attended_key_that_is_inf_reaches_no_query_that_does_not_attend_it(shifts_values):
    mask = AttentionMask(32, 32, is_causal=True)
    clean = normal_inputs(mask, heads=2, groups=2, dim=16)
    clean = clean._replace(k=clean.k + 3, v=clean.v + 3)
    true = through_autograd(clean, mask, shifts_values=shifts_values)
    for garbage in (float("inf"), -float("inf"), float("nan")):
        dirty = clean._replace(k=clean.k.clone())
        dirty.k[:, 0, 20, 5] = garbage
        found = through_autograd(dirty, mask, shifts_values=shifts_values)
        assert largest_error(found[0][:, 0, :20], true[0][:, 0, :20]) < 1e-10
        for ours, right in zip(found, true, strict=True):
            assert torch.equal(ours[:, 1], right[:, 1])  # the other head


def test_values_are_not_shifted_under_dropout():
    mask = AttentionMask(4, 4)
    call = AttentionCall(*normal_inputs(mask)[:3], mask, 1.0, dropout=0.1)
    with pytest.raises(ConfigurationError, match="dropped weights do not sum to one"):
        delegate_attention(call, shifts_values=True)


def test_dropout_drops_about_its_probability_and_keeps_the_mean():
    torch.manual_seed(0)
    mask = AttentionMask(256, 256)
    q, k, _, _ = normal_inputs(mask)
    ones = torch.ones_like(k)
    output = delegate_attention(AttentionCall(0 * q, k, ones, mask, 1.0, dropout=0.25))
    assert output.mean().item() == pytest.approx(1, abs=0.02) and output.std() > 0.01


@pytest.mark.parametrize("name", ["flash-attn", "te", "cudnn", "npu-fusion"])
def test_a_vendor_that_is_not_there_is_refused_with_the_reason(name):
    mask = AttentionMask(4, 4)
    call = AttentionCall(*normal_inputs(mask)[:3], mask, 1.0)
    with pytest.raises(ConfigurationError, match=f"{name} cannot compute this attention: it "):
        choose_vendor(call, name)
    with pytest.raises(ConfigurationError, match="no such attention"):
        choose_vendor(call, "fastest")
    assert choose_vendor(call).name == "sdpa"


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)),
        ((1, 4, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)),
        ((1, 4, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
    ],
    ids=["heads", "lengths", "mask"],
)
def test_tensors_that_do_not_fit_together_are_refused(q, k, v):
    with pytest.raises(ValueError):
        AttentionCall(*map(torch.zeros, (q, k, v)), mask=AttentionMask(4, 4), scale=1.0)


# --- calls that are recorded -------------------------------------------------------------------


class Recorded:
    """Stands for a vendor's function: answers by the oracle, so that layouts are checked too."""

    def __init__(self, layout: str):
        self.calls = []
        self.layout = layout

    def __call__(self, q, k, v, *args, **options):
        self.calls.append((args, options))
        to_heads_first = {
            "BNSD": lambda x: x,
            "BSND": lambda x: x.transpose(1, 2),
            "TND": lambda x: x.transpose(0, 1)[None],
        }[self.layout]
        shaped = [to_heads_first(x) for x in (q, k, v)]
        mask = AttentionMask(shaped[0].shape[2], shaped[1].shape[2])
        output = exact_forward(*shaped, mask, 1.0).output_BHSE
        if self.layout == "BNSD":
            return (output,) if "sparse_mode" in options else output
        if self.layout == "TND":
            answer = output[0].transpose(0, 1)
            return (answer,) if "sparse_mode" in options else answer
        return output.transpose(1, 2)


PACKED = PackedSequences(cumulative(3, 5), cumulative(3, 5))
NPU_CASES = {
    "full": (AttentionMask(8, 8), {"sparse_mode": 0, "inner_precise": 0}),
    "causal": (AttentionMask(8, 8, is_causal=True), {"sparse_mode": 3, "inner_precise": 0}),
    "causal, more queries": (
        AttentionMask(8, 6, is_causal=True),
        {"sparse_mode": 3, "inner_precise": 2},
    ),
    "band": (
        AttentionMask(8, 8, window=(2, 1)),
        {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1, "inner_precise": 0},
    ),
    "causal window": (
        AttentionMask(8, 8, is_causal=True, window=(2, -1)),
        {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0},
    ),
    "packed": (
        AttentionMask(8, 8, is_causal=True, packed=PACKED),
        {"sparse_mode": 3, "actual_seq_qlen": [3, 8], "actual_seq_kvlen": [3, 8]},
    ),
}


@pytest.mark.parametrize("name", NPU_CASES)
def test_ascends_operator_is_called_by_its_contract(monkeypatch, name):
    mask, wanted = NPU_CASES[name]
    operator = Recorded("BNSD" if mask.packed is None else "TND")
    monkeypatch.setattr(
        vendors.importlib, "import_module", lambda _: SimpleNamespace(npu_fusion_attention=operator)
    )
    inputs = normal_inputs(mask, heads=4, groups=2)
    call = AttentionCall(*inputs[:3], mask, 1.0, dropout=0.25)
    output = vendors.NpuFusion().run(call)
    (((head_num, layout), options),) = operator.calls
    assert (head_num, layout) == (4, operator.layout)
    assert options["scale"] == 1.0 and options["keep_prob"] == 0.75
    assert {key: options[key] for key in wanted} == wanted
    is_triangle = options["sparse_mode"] in (3, 4)
    assert ("atten_mask" in options) == is_triangle
    if is_triangle:  # True hides a key; one triangle of fixed size stands for any length
        assert torch.equal(options["atten_mask"], torch.ones(2048, 2048).triu(1).bool())
    served = mask.served_queries_BS()[0]
    true = exact_forward(*inputs[:3], AttentionMask(8, mask.num_keys), 1.0).output_BHSE
    assert torch.allclose(output[:, :, served], true[:, :, served])
    assert not output[:, :, ~served].any()


def test_ascend_is_handed_no_packed_queries_that_attend_nothing_and_no_padding(monkeypatch):
    def on_ascend(is_causal: bool, *keys: int) -> AttentionCall:
        packed = PackedSequences(cumulative(3, 5), cumulative(*keys))
        mask = AttentionMask(8, sum(keys), is_causal, packed=packed)
        q, k, v = (x.float() for x in normal_inputs(mask)[:3])
        return AttentionCall(q, k, v, mask, 1.0)

    monkeypatch.setattr(AttentionCall, "device", SimpleNamespace(type="npu"))
    monkeypatch.setattr(vendors.importlib.util, "find_spec", lambda name: True)
    reason = vendors.NpuFusion().reason_against
    assert reason(on_ascend(True, 3, 5)) is reason(on_ascend(False, 1, 7)) is None
    for call in (on_ascend(True, 1, 7), on_ascend(False, 0, 8)):
        assert "attend nothing" in str(reason(call))
        assert choose_vendor(call).name == "sdpa"
    used = torch.tensor([2, 4])
    padded = PackedSequences(cumulative(3, 5), cumulative(3, 5), used, used)
    mask = AttentionMask(8, 8, packed=padded)
    q, k, v = (x.float() for x in normal_inputs(mask)[:3])
    assert "no padding" in str(reason(AttentionCall(q, k, v, mask, 1.0)))


def test_an_arbitrary_mask_reaches_ascend_inverted():
    mask = MASKS["arbitrary"]
    call = AttentionCall(*normal_inputs(mask)[:3], mask, 1.0)
    options = vendors.fusion_options(call)
    assert torch.equal(options["atten_mask"], ~mask.allowed) and options["sparse_mode"] == 0


@pytest.mark.parametrize("is_packed", [False, True])
def test_flash_attn_is_called_with_its_layout_and_names(monkeypatch, is_packed):
    mask = AttentionMask(8, 8, is_causal=True, window=(4, -1), packed=PACKED if is_packed else None)
    function = Recorded("TND" if is_packed else "BSND")
    name = "flash_attn_varlen_func" if is_packed else "flash_attn_func"
    monkeypatch.setattr(
        vendors.importlib, "import_module", lambda _: SimpleNamespace(**{name: function})
    )
    inputs = normal_inputs(mask, heads=4, groups=2)
    output = vendors.FlashAttn().run(AttentionCall(*inputs[:3], mask, 1.0))
    ((args, options),) = function.calls
    assert options == {
        "dropout_p": 0.0,
        "softmax_scale": 1.0,
        "causal": True,
        "window_size": (4, -1),
    }
    if is_packed:
        assert [x.tolist() if torch.is_tensor(x) else x for x in args] == [[0, 3, 8]] * 2 + [5, 5]
    true = exact_forward(*inputs[:3], AttentionMask(8, 8), 1.0).output_BHSE
    assert torch.allclose(output, true)
