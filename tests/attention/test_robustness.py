# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs that break the published arithmetic, or any: long and flat, huge, one outlier, garbage
where nobody may look, nothing to look at."""

from itertools import product
from math import sqrt

import pytest
import torch

from megatron_asynchzp.attention.key_shift import SnapRule, _means, shift_keys, zero_unused
from megatron_asynchzp.attention.mask import AttentionMask
from megatron_asynchzp.attention.reference.block import block_backward, block_forward
from scripts.testbed.attention.paper import (
    ALL_FP16,
    FP16_FP32_VECTOR,
    paper_backward,
    paper_forward,
)
from scripts.testbed.attention.paper_data import Inputs, PaperData, normal_inputs, relative_rmse
from tests.attention.cases import exact, masks, with_garbage

BETA = 0.9374311


def by_block(inputs: Inputs, mask: AttentionMask, block_size=128, rule=SnapRule.LOSSLESS):
    q, k, v, d_output = inputs
    scale = 1 / sqrt(q.shape[-1])
    used = mask.used_keys_BT() if mask.has_unused_keys else None
    keys = shift_keys(k, block_size, rule=rule, used_BT=used)
    done = block_forward(q, keys, v, mask, scale)
    output, lse = done.result.output_BHSE, done.shifted_lse_BHS
    return [*done.result, *block_backward(d_output, q, keys, v, output, lse, mask, scale)]


def by_paper(inputs: Inputs, mask: AttentionMask):
    q, k, v, d_output = inputs
    scale = 1 / sqrt(q.shape[-1])
    done = paper_forward(q, k, v, mask, scale, BETA, FP16_FP32_VECTOR)
    return [
        *done.result,
        *paper_backward(d_output, q, k, v, done, mask, scale, BETA, FP16_FP32_VECTOR),
    ]


def test_65536_flat_keys_with_values_around_30_neither_overflow_nor_drift():
    mask = AttentionMask(4, 65536)
    drawn = normal_inputs(mask, heads=1, dim=16)
    inputs = drawn._replace(q=0.01 * drawn.q, k=0.01 * drawn.k + 1, v=drawn.v + 30)
    inputs = inputs.to(torch.float16)
    output, lse, *_ = exact(inputs, mask, 0.25)
    found_output, found_lse, *gradients = by_block(inputs, mask)
    assert relative_rmse(found_output, output) < 3e-4
    assert (found_lse - lse).abs().max() < 1e-4
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("rule", SnapRule)
@pytest.mark.parametrize("x0", [0, 30])
def test_an_amplitude_of_100_stays_finite_and_right(x0, rule):
    mask = AttentionMask(256, 256)
    inputs = PaperData("uniform", x0, 100).draw(256).to(torch.float16)
    true = exact(inputs, mask, 1 / sqrt(128))
    found = by_block(inputs, mask, rule=rule)
    assert all(x.isfinite().all() for x in found)
    assert relative_rmse(found[0], true[0]) < 1e-2
    assert all(x.isfinite().all() for x in by_paper(inputs, mask))


@pytest.mark.parametrize("where", [0, 100, 255])
def test_one_key_times_1000_stays_finite_and_right(where):
    mask = AttentionMask(256, 256, is_causal=True)
    drawn = normal_inputs(mask, dim=64)
    drawn.k[:, :, where] *= 1000
    inputs = drawn.to(torch.float16)
    true, found = exact(inputs, mask, 1 / 8), by_block(inputs, mask)
    assert all(x.isfinite().all() for x in found)
    assert relative_rmse(found[0], true[0]) < 1e-3
    assert all(relative_rmse(f, t) < 1e-2 for f, t in zip(found[2:], true[2:]))
    assert all(x.isfinite().all() for x in by_paper(inputs, mask))


@pytest.mark.parametrize("garbage", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["padding", "packed, padded"])
@pytest.mark.parametrize("way", [by_block, by_paper], ids=["block", "paper"])
def test_what_a_padded_slot_holds_reaches_nobody(way, name, garbage):
    mask = masks(200, 300)[name]
    clean = normal_inputs(mask).to(torch.float16)
    dirty = with_garbage(clean, mask, garbage)
    for found, true in zip(way(dirty, mask), way(clean, mask), strict=True):
        assert torch.equal(found, true)


@pytest.mark.parametrize("rule", SnapRule)
@pytest.mark.parametrize("large", [0, 1, 127, 128, 129])
def test_a_last_block_of_few_keys_is_shifted_as_it_is_by_itself(large, rule):
    """130 keys are blocks of 128 and of 2; a large key sets the grid of its own block alone."""
    keys = torch.full((1, 1, 130, 4), 3.125, dtype=torch.float16)
    keys[:, :, large] = 60_000.0
    found = shift_keys(keys, 128, rule=rule)
    for block, alone in enumerate((keys[:, :, :128], keys[:, :, 128:])):
        by_itself = shift_keys(alone, 128, rule=rule)
        assert torch.equal(found.shift_BGJD[:, :, block], by_itself.shift_BGJD[:, :, 0])
        assert torch.equal(found.keys_BGTD[:, :, 128 * block :][:, :, :128], by_itself.keys_BGTD)
    plain = 1 if large < 128 else 0
    assert found.shift_BGJD[0, 0, plain].tolist() == [3.125] * 4


@pytest.mark.parametrize("block_size", [40, 1, 7, 16])
def test_a_mean_is_that_of_the_keys_that_are_used(block_size):
    generator = torch.Generator().manual_seed(1)
    keys = 3 + torch.rand(2, 2, 40, 4, generator=generator, dtype=torch.float64)
    used = torch.rand(2, 40, generator=generator) < 0.5
    means_BGJD, mean_BG1D = _means(zero_unused(keys, used), used, block_size, keys.dtype)
    for batch, block in product(range(2), range(means_BGJD.shape[2])):
        here = slice(block * block_size, (block + 1) * block_size)
        taken = keys[batch, :, here][:, used[batch, here]]
        mean = taken.mean(1) if taken.shape[1] else torch.zeros(2, 4, dtype=keys.dtype)
        torch.testing.assert_close(means_BGJD[batch, :, block], mean)
        mean = keys[batch][:, used[batch]].mean(1)
        torch.testing.assert_close(mean_BG1D[batch, :, 0], mean)


@pytest.mark.parametrize("way", [by_block, by_paper], ids=["block", "paper"])
def test_a_query_that_may_attend_nothing_gives_zero_and_disturbs_nobody(way):
    mask = AttentionMask(300, 200, is_causal=True)  # the first 100 queries come before any key
    inputs = normal_inputs(mask, dim=64).to(torch.float16)
    true = exact(inputs, mask, 1 / 8)
    output, lse, dq, dk, dv = way(inputs, mask)
    assert not output[:, :, :100].any() and not dq[:, :, :100].any()
    assert lse[:, :, :100].isneginf().all() and lse[:, :, 100:].isfinite().all()
    for found, right in zip((output, dq, dk, dv), (true[0], *true[2:]), strict=True):
        assert relative_rmse(found, right) < 5e-3


@pytest.mark.parametrize("precision", [ALL_FP16, FP16_FP32_VECTOR], ids=["fp16", "fp32 vector"])
@pytest.mark.parametrize("amplitude", [50, 100])
def test_an_exponent_that_is_positive_by_a_rounding_cannot_overflow(amplitude, precision):
    """The published (m_j - m_new) + dc, where one unit in the last place of a score is large."""
    mask = AttentionMask(512, 512)
    inputs = PaperData("uniform", 0, amplitude).draw(512).to(torch.float16)
    q, k, v, _ = inputs
    done = paper_forward(q, k, v, mask, 1 / sqrt(128), BETA, precision)
    assert all(x.isfinite().all() for x in done.result)
