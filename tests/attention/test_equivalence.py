# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Without rounding every mode is softmax attention, forward and backward, whatever is masked and
however much is shifted."""

from functools import cache
from itertools import product
from unittest.mock import patch

import pytest
import torch

from megatron_asynchzp.attention.key_shift import SnapRule, shift_keys
from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences
from megatron_asynchzp.attention.reference import block
from scripts.testbed.attention import paper
from scripts.testbed.attention.paper_data import Inputs, normal_inputs
from scripts.testbed.attention.shifting import INITIAL_BETAS, solve_beta
from tests.attention.cases import cumulative, exact, largest_error, masks
from tests.support.selection import slow_unless

SCALE = 0.21
BLOCK = 32
BETAS = [solve_beta(start) for start in INITIAL_BETAS]
TOLERANCE = 1e-10
MASKS = masks()


@cache
def oracle(mask_name: str, heads: int, groups: int) -> tuple[Inputs, list[torch.Tensor]]:
    """Biased inputs, and O, LSE, dQ, dK, dV of the oracle."""
    drawn = normal_inputs(MASKS[mask_name], heads=heads, groups=groups, dim=24, value_dim=16)
    inputs = drawn._replace(k=drawn.k + 3)
    return inputs, exact(inputs, MASKS[mask_name], SCALE)


def by_paper(inputs: Inputs, mask: AttentionMask, beta: float) -> list[torch.Tensor]:
    q, k, v, d_output = inputs
    forward = paper.paper_forward(q, k, v, mask, SCALE, beta, paper.FP64, BLOCK)
    gradients = paper.paper_backward(
        d_output, q, k, v, forward, mask, SCALE, beta, paper.FP64, BLOCK
    )
    return [*forward.result, *gradients]


def by_block(
    inputs: Inputs, mask: AttentionMask, _: float, is_global=False, rule=SnapRule.RATIO
) -> list[torch.Tensor]:
    q, k, v, d_output = inputs
    used = mask.used_keys_BT() if mask.has_unused_keys else None
    shifted = shift_keys(k, None if is_global else BLOCK, rule=rule, used_BT=used)
    with patch.object(block, "BLOCK_SIZE", BLOCK):  # of a global shift
        forward = block.block_forward(q, shifted, v, mask, SCALE)
        output, lse = forward.result.output_BHSE, forward.shifted_lse_BHS
        gradients = block.block_backward(d_output, q, shifted, v, output, lse, mask, SCALE)
    return [*forward.result, *gradients]


MODES = {
    "paper": by_paper,
    "block": by_block,
    "block, lossless": lambda *args: by_block(*args, rule=SnapRule.LOSSLESS),
    "global": lambda *args: by_block(*args, is_global=True),
    "global, lossless": lambda *args: by_block(*args, is_global=True, rule=SnapRule.LOSSLESS),
}


def errors(found: list[torch.Tensor], true: list[torch.Tensor]) -> dict[str, float]:
    names = ("O", "LSE", "dQ", "dK", "dV")
    return {n: largest_error(f, t) for n, f, t in zip(names, found, true, strict=True)}


# Fast: each mode with each mask, on one of the betas and kinds of heads in turn.
HEADS = [(2, 2), (4, 2)]  # each its own keys, and shared ones
NUM_FORMS = len(HEADS) * len(BETAS)
EVERY = [
    slow_unless(place % NUM_FORMS == place // NUM_FORMS % NUM_FORMS, *one)
    for place, one in enumerate(product(MODES, MASKS, HEADS, BETAS))
]


@pytest.mark.parametrize("mode, mask_name, heads, beta", EVERY)
def test_in_fp64_every_mode_is_softmax_attention(mode, mask_name, heads, beta):
    inputs, true = oracle(mask_name, *heads)
    found = errors(MODES[mode](inputs, MASKS[mask_name], beta), true)
    assert max(found.values()) < TOLERANCE, found


def test_the_oracle_is_torchs_own_softmax_attention_and_its_autograd():
    inputs, true = oracle("causal", 2, 2)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    score = SCALE * q @ k.mT + torch.full((90, 90), -torch.inf, dtype=q.dtype).triu(1)
    output = score.softmax(-1) @ v
    gradients = torch.autograd.grad(output, (q, k, v), inputs.d_output)
    found = errors([output.detach(), score.logsumexp(-1).detach(), *gradients], true)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_are_what_each_is_alone(mode):
    mask = MASKS["packed causal"]
    inputs, _ = oracle("packed causal", 2, 2)
    found = MODES[mode](inputs, mask, BETAS[1])
    edges = mask.packed.cu_seqlens_q.tolist()
    for start, stop in zip(edges, edges[1:]):
        alone = Inputs(*(x[:, :, start:stop] for x in inputs))
        true = exact(alone, AttentionMask(stop - start, stop - start, is_causal=True), SCALE)
        worst = errors([x[:, :, start:stop] for x in found], true)
        assert max(worst.values()) < TOLERANCE, (start, worst)


@pytest.mark.parametrize("name", [n for n, m in MASKS.items() if m.allowed is None])
def test_ranges_of_queries_per_key_cover_exactly_what_the_mask_allows(name):
    mask = MASKS[name]
    allowed = mask.allowed_BHST()[:, 0]
    ranges = mask.key_ranges()
    assert (ranges.start_S.diff() >= 0).all() and (ranges.stop_S.diff() >= 0).all()
    first, last = ranges.transposed(mask.num_keys)
    queries = torch.arange(mask.num_queries)[:, None]
    covered = ((first <= queries) & (queries < last))[None]
    is_used = allowed.any(1)
    assert not (allowed & ~covered).any()
    # Tight at both ends, so a kernel visits no tile for nothing.
    for b, t in is_used.nonzero().tolist():
        rows = allowed[b, :, t].nonzero()[:, 0]
        assert (first[t], last[t]) == (rows[0], rows[-1] + 1)
    assert torch.equal(mask.used_keys_BT() | is_used, mask.used_keys_BT())


def test_sequences_that_end_before_their_room_does_see_no_padding():
    lengths = torch.tensor([3, 2])
    packed = PackedSequences(cumulative(5, 4), cumulative(5, 4), lengths, lengths)
    allowed = AttentionMask(9, 9, packed=packed).allowed_BHST()[0, 0]
    real = torch.tensor([True, True, True, False, False, True, True, False, False])
    block_of = torch.tensor([0] * 5 + [1] * 4)
    assert torch.equal(allowed, real[:, None] & real & (block_of[:, None] == block_of))
