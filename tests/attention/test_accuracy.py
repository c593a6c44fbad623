# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What half precision leaves: the paper's data, FlashAttention's own rule, and gradients that do
not depend on the bias of K. Controls are the same arithmetic without a shift."""

from collections.abc import Callable
from itertools import product
from math import sqrt
from statistics import median

import pytest
import torch

from megatron_asynchzp.attention.call import AttentionGradients
from megatron_asynchzp.attention.key_shift import ShiftedKeys, shift_keys
from megatron_asynchzp.attention.mask import AttentionMask
from megatron_asynchzp.attention.reference.block import block_backward, block_forward, gemm
from scripts.testbed.attention.exact import exact_forward
from scripts.testbed.attention.paper import ALL_FP16, FP16_FP32_VECTOR, paper_forward
from scripts.testbed.attention.paper_data import (
    PAPER_GRID,
    Inputs,
    PaperData,
    normal_inputs,
    relative_rmse,
)
from scripts.testbed.attention.shifting import INITIAL_BETAS, solve_beta
from scripts.testbed.differences import largest
from tests.attention.cases import growth_of_dq_error, resonant_inputs
from tests.support.selection import slow_unless

LENGTH, DIM = 384, 128
SCALE = 1 / sqrt(DIM)
FULL = AttentionMask(LENGTH, LENGTH)


def unshifted(k: torch.Tensor) -> ShiftedKeys:
    """The control: keys as they are, so that block mode is what FlashAttention computes."""
    nothing = k.new_zeros(*k.shape[:2], 1, k.shape[3], dtype=torch.float32)
    return ShiftedKeys(k, nothing, nothing, k.shape[2])


def centred_only(k: torch.Tensor) -> ShiftedKeys:
    """Keys as they are, with their mean: dQ is still centred, by the row sums of dS."""
    return unshifted(k)._replace(mean_BG1D=k.mean(2, keepdim=True, dtype=torch.float32))


def forward(inputs: Inputs, keys: ShiftedKeys, mask=FULL, scale=SCALE):
    return block_forward(inputs.q, keys, inputs.v, mask, scale)


def gradients(inputs: Inputs, keys: ShiftedKeys, mask=FULL, scale=SCALE) -> AttentionGradients:
    q, _, v, d_output = inputs
    done = forward(inputs, keys, mask, scale)
    output, lse = done.result.output_BHSE, done.shifted_lse_BHS
    return block_backward(d_output, q, keys, v, output, lse, mask, scale)


def fp16_scores_without_scale(inputs: Inputs) -> torch.Tensor:
    """Eager attention whose QK^T is stored in fp16 before it is scaled."""
    q, k, v, _ = inputs
    score = gemm(q, k.mT.contiguous(), torch.float16)
    p = (SCALE * score.float()).softmax(-1)
    return gemm(p.half(), v, torch.float16)


CASES = {f"{c.law} {c.x0} {c.amplitude}": c for c in PAPER_GRID}
# Both laws, with the largest bias and without one.
FAST_CASES = ("uniform 30 0.5", "uniform 0 20", "hybrid 0 10", "hybrid 30 20")
each_case = pytest.mark.parametrize(
    "case", [slow_unless(name in FAST_CASES, case, id=name) for name, case in CASES.items()]
)


@each_case
def test_on_the_papers_data_block_mode_is_as_accurate_as_without_a_shift(case: PaperData):
    inputs = case.draw(LENGTH).to(torch.float16)
    true = exact_forward(*inputs[:3], FULL, SCALE).output_BHSE
    control = relative_rmse(forward(inputs, unshifted(inputs.k)).result.output_BHSE, true)
    for block_size in (128, None):
        found = forward(inputs, shift_keys(inputs.k, block_size)).result
        assert found.output_BHSE.isfinite().all() and found.lse_BHS.isfinite().all()
        assert relative_rmse(found.output_BHSE, true) <= 2 * control + 3e-4


@each_case
def test_on_the_papers_data_the_published_arithmetic_never_overflows(case: PaperData):
    inputs = case.draw(LENGTH).to(torch.float16)
    true = exact_forward(*inputs[:3], FULL, SCALE).output_BHSE
    for precision in (ALL_FP16, FP16_FP32_VECTOR):
        for start in INITIAL_BETAS:
            beta = solve_beta(start, head_dim=DIM)
            found = paper_forward(*inputs[:3], FULL, SCALE, beta, precision).result.output_BHSE
            assert found.isfinite().all()
            assert relative_rmse(found, true) < 0.1


@pytest.mark.parametrize("sign", [1, -1])
def test_resonance_in_either_sign_overflows_no_mode(sign):
    inputs = resonant_inputs(sign, LENGTH).to(torch.float16)
    assert fp16_scores_without_scale(inputs).isnan().all()
    true = exact_forward(*inputs[:3], FULL, SCALE)
    for keys in (unshifted(inputs.k), shift_keys(inputs.k, 128), shift_keys(inputs.k)):
        found = forward(inputs, keys).result
        assert relative_rmse(found.output_BHSE, true.output_BHSE) < 1e-3
        assert (found.lse_BHS - true.lse_BHS).abs().max() < 1e-2
    for precision in (ALL_FP16, FP16_FP32_VECTOR):
        beta = solve_beta(INITIAL_BETAS[0], head_dim=DIM)
        found = paper_forward(*inputs[:3], FULL, SCALE, beta, precision).result
        assert found.output_BHSE.isfinite().all() and found.lse_BHS.isfinite().all()


@pytest.mark.parametrize(
    "dtype, is_causal",
    [
        (torch.float16, True),
        (torch.bfloat16, False),
        slow_unless(False, torch.float16, False),
        slow_unless(False, torch.bfloat16, True),
    ],
)
def test_the_error_of_dq_does_not_depend_on_the_bias_of_k(dtype, is_causal):
    mask = AttentionMask(LENGTH, LENGTH, is_causal=is_causal)
    ways = {
        "block": lambda k: shift_keys(k, 128),
        "global": shift_keys,
        "none": centred_only,  # the r term alone
        "control": unshifted,
    }

    def growth(keys_of: Callable[[torch.Tensor], ShiftedKeys]) -> float:
        return growth_of_dq_error(
            lambda inputs, _: gradients(inputs, keys_of(inputs.k), mask).dq_BHSD,
            mask,
            dtype,
            dim=DIM,
            groups=2,
        )

    found = {name: growth(keys_of) for name, keys_of in ways.items()}
    assert found.pop("control") >= 20
    assert largest(found.values()) <= 1.5, found


# --- FlashAttention's rule ---------------------------------------------------------------------

# Lengths of queries and keys from its list that one core does in reasonable time.
SHAPES = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)]
FAST_SHAPES = [((113, 203), False), ((108, 256), True)]
LONG_SHAPES = [(1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)]


def in_one_dtype(inputs: Inputs, mask: AttentionMask, dtype: torch.dtype) -> list[torch.Tensor]:
    """O, dQ, dK, dV as plain torch computes them in `dtype`, autograd included."""
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs[:3])
    repeats = q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(repeats, 1) for x in (k, v))
    score = q @ (k_all * (1 / sqrt(q.shape[-1]))).mT
    allowed = mask.allowed_BHST()
    is_empty = ~allowed.any(-1, keepdim=True)
    p = score.masked_fill(~allowed & ~is_empty, -torch.inf).softmax(-1).masked_fill(is_empty, 0)
    output = p @ v_all
    grads = torch.autograd.grad(output, (q, k, v), inputs.d_output.to(dtype))
    return [output.detach(), *grads]


def worst_ratios(inputs: Inputs, mask: AttentionMask, keys: ShiftedKeys) -> dict[str, float]:
    """Largest error of O, dQ, dK, dV over what the rule allows: twice that of plain torch in the
    same dtype, plus twice what adding and taking off 0.3 costs."""
    dtype = inputs.q.dtype
    scale = 1 / sqrt(inputs.q.shape[-1])
    output = forward(inputs, keys, mask, scale).result.output_BHSE
    grads = gradients(inputs, keys, mask, scale)
    true = [x.to(dtype) for x in in_one_dtype(inputs, mask, torch.float32)]
    plain = in_one_dtype(inputs, mask, dtype)
    ratios = {}
    for name, f, p, t in zip(("O", "dQ", "dK", "dV"), [output, *grads], plain, true, strict=True):
        allowed = 2 * (p - t).abs().max() + 2 * (t + 0.3 - 0.3 - t).abs().max()
        ratios[name] = ((f - t).abs().max() / allowed).item()
    return ratios


def biased(mask: AttentionMask, dim: int, k_bias: float, v_bias: float, dtype, seed=0) -> Inputs:
    drawn = normal_inputs(mask, heads=2, groups=1, dim=dim, seed=seed)
    return drawn._replace(k=drawn.k + k_bias, v=drawn.v + v_bias).to(dtype)


def check_rule(lengths, dim, is_causal, dtype, draws: int = 1) -> None:
    """draws: of these the median has to keep the rule. It compares the largest of many rounding
    errors with that of one other run, which by chance may be small."""
    mask = AttentionMask(*lengths, is_causal=is_causal)
    for bias in ((0, 0), (3, 0), (30, 0), (10, 30)):
        found = []
        for seed in range(draws):
            inputs = biased(mask, dim, *bias, dtype, seed)
            found.append(worst_ratios(inputs, mask, shift_keys(inputs.k, 128)))
            if seed == 0 and largest(found[0].values()) <= 1:
                break  # as nearly always
        for name in found[0]:
            assert median(largest([ratios[name]]) for ratios in found) <= 1, (bias, found)


@pytest.mark.parametrize(
    "lengths, is_causal",
    [slow_unless(one in FAST_SHAPES, *one) for one in product(SHAPES, (False, True))],
    ids=str,
)
def test_flash_attentions_rule_holds_with_and_without_bias(lengths, is_causal):
    check_rule(lengths, 64, is_causal, torch.float16)
    check_rule(lengths, 64, is_causal, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [32, 40, 59, 96, 111, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", SHAPES + LONG_SHAPES, ids=str)
def test_flash_attentions_rule_holds_on_its_whole_list(lengths, dim, is_causal):
    # One draw breaks it: (256, 512), d = 32, V bias 30, by 0.5% in dK, shifted or not.
    check_rule(lengths, dim, is_causal, torch.float16, draws=3)


def test_the_same_arithmetic_without_a_shift_breaks_that_rule_for_dq():
    mask = AttentionMask(512, 512)
    inputs = biased(mask, 128, 10, 30, torch.float16)
    control = worst_ratios(inputs, mask, unshifted(inputs.k))
    shifted = worst_ratios(inputs, mask, shift_keys(inputs.k, 128))
    assert control["dQ"] > 1.5, control
    assert shifted["dQ"] < 0.1, shifted
