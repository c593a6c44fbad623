# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Any packed sequences, with as many queries and keys as they like: what each is alone, and zeros
where a query attends nothing."""

from itertools import product
from math import inf

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask, PackedSequences
from megatron_asynchzp.attention.pasa import MODES, pasa_attention
from scripts.testbed.attention.paper_data import Inputs, normal_inputs
from tests.attention.cases import cumulative, largest_error

LENGTHS = st.lists(st.tuples(*[st.integers(0, 6)] * 4), min_size=1, max_size=4).filter(
    lambda drawn: any(real[0] for real in drawn) and any(real[1] for real in drawn)
)
WINDOWS = st.none() | st.tuples(st.integers(-1, 4), st.integers(-1, 4))

NOTHING_ATTENDED = AttentionMask(1, 1, packed=PackedSequences(cumulative(0, 1), cumulative(1, 0)))


@st.composite
def packed_masks(draw: st.DrawFn) -> AttentionMask:
    """Up to 4 sequences of up to 6 queries and keys each, some with padding behind."""
    drawn, is_padded = draw(LENGTHS), draw(st.booleans())
    queries, keys, pad_q, pad_k = zip(*drawn, strict=True)
    lengths = (torch.tensor(queries), torch.tensor(keys)) if is_padded else ()
    room_q = [q + p * is_padded for q, p in zip(queries, pad_q, strict=True)]
    room_k = [k + p * is_padded for k, p in zip(keys, pad_k, strict=True)]
    starts = (cumulative(*room).to(draw(st.sampled_from([torch.int32, torch.int64])))
              for room in (room_q, room_k))  # fmt: skip
    packed = PackedSequences(*starts, *lengths)
    causal, window = draw(st.booleans()), draw(WINDOWS)
    return AttentionMask(sum(room_q), sum(room_k), causal, window, packed=packed)


def naive(mask: AttentionMask, inputs: Inputs) -> list[torch.Tensor]:
    """The output and the gradients, query by query."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    assert mask.packed is not None
    left, right = mask.window or (-1, -1)
    right = 0 if mask.is_causal else right
    rows = [torch.zeros_like(v[0, 0, 0]) + 0 * (q.sum() + k.sum() + v.sum())] * mask.num_queries
    (q_starts, q_lengths), (k_starts, k_lengths) = mask.packed.of_queries(), mask.packed.of_keys()
    for q0, nq, k0, nk in zip(q_starts, q_lengths, k_starts, k_lengths, strict=True):
        for i in range(nq):
            diagonal = i + int(nk - nq)
            first = diagonal - left if left >= 0 else -inf
            last = diagonal + right if right >= 0 else inf
            seen = [int(k0) + j for j in range(nk) if first <= j <= last]
            if seen:
                weights = (k[0, 0, seen] @ q[0, 0, q0 + i]).softmax(0)
                rows[int(q0) + i] = weights @ v[0, 0, seen]
    output = torch.stack(rows)[None, None]
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), inputs.d_output)]


@settings(max_examples=30)
@given(mask=packed_masks())
@example(mask=NOTHING_ATTENDED)
def test_packed_sequences_are_attended_one_by_one_in_every_mode(mask):
    drawn = normal_inputs(mask, heads=1, dim=4)
    inputs = drawn._replace(k=drawn.k + 3, v=drawn.v + 5)
    true = naive(mask, inputs)
    is_empty = ~mask.served_queries_BS()[0]
    assert torch.equal(is_empty, (true[0] == 0).all(-1)[0, 0])
    for mode, shifts_values in product(MODES, (False, True)):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        output = pasa_attention(
            AttentionCall(*leaves, mask, 1.0), mode, shifts_values=shifts_values
        )
        found = [output.detach(), *torch.autograd.grad(output, leaves, inputs.d_output)]
        assert max(largest_error(*pair) for pair in zip(found, true, strict=True)) < 1e-10
        assert not found[0][:, :, is_empty].any()


@settings(max_examples=100)
@given(
    lengths=st.tuples(st.integers(1, 5), st.integers(0, 5)), is_causal=st.booleans(), window=WINDOWS
)
def test_a_mask_knows_without_looking_whether_it_leaves_queries_out(lengths, is_causal, window):
    mask = AttentionMask(*lengths, is_causal, window)
    assert mask.may_leave_queries_out == (not mask.served_queries_BS().all())
