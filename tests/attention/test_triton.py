# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The fused kernels in triton's interpreter: right in fp32, and as accurate as the reference in
fp16. (The interpreter computes bf16 products wrongly without saying so: that needs a GPU.)"""

import mmap

import pytest
import torch

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.mask import AttentionMask
from scripts.testbed.attention.paper_data import Inputs, normal_inputs, relative_rmse
from tests.attention.cases import exact, growth_of_dq_error, largest_error, masks, with_garbage
from tests.attention.interpreted import attend, interpreter
from tests.support.selection import slow_unless

pytest.importorskip("triton", reason="needs triton: pip install megatron_asynchzp[triton]")

SCALE = 0.15
# Lengths that no tile divides, over more than one block of keys that share a shift.
MASKS = {name: mask for name, mask in masks(70, 150).items() if mask.allowed is None}
IN_FP16 = ("causal, more queries", "causal window", "packed causal, more queries", "padding")


@pytest.fixture(scope="module")
def interpreted():
    with interpreter() as call:
        yield call


def biased(mask: AttentionMask, dtype: torch.dtype, bias: float = 8.0, **sizes) -> Inputs:
    drawn = normal_inputs(mask, **{"dim": 32, **sizes})
    # Other means in other blocks, so that each block has a shift of its own.
    steps = bias + torch.arange(mask.num_keys).div(128, rounding_mode="floor") * 4.0
    return drawn._replace(k=drawn.k + steps[:, None]).to(dtype)


@pytest.mark.parametrize(
    "name",
    ["causal window", "packed, padded", slow_unless(False, "full"), slow_unless(False, "padding")],
)
def test_in_fp32_the_kernels_are_softmax_attention_and_its_gradients(interpreted, name):
    mask = MASKS[name]
    inputs = biased(mask, torch.float32, heads=2, groups=1, value_dim=16)
    found = interpreted(attend, inputs, mask, SCALE, is_fused=True)
    for one, true in zip(found, exact(inputs, mask, SCALE), strict=True):
        assert largest_error(one, true) < 1e-4 * true[true.isfinite()].abs().max()


@pytest.mark.parametrize("name", [slow_unless(name in IN_FP16, name) for name in MASKS])
def test_in_fp16_the_kernels_are_as_accurate_as_the_reference(interpreted, name):
    mask = MASKS[name]
    inputs = biased(mask, torch.float16, heads=2, groups=1)
    found = interpreted(attend, inputs, mask, SCALE, is_fused=True)
    reference = attend(inputs, mask, SCALE, is_fused=False)
    for one, other, true in zip(found, reference, exact(inputs, mask, SCALE), strict=True):
        assert torch.equal(one.isneginf(), true.isneginf())
        one, other, true = (x.masked_fill(x.isneginf(), 0) for x in (one, other, true))
        assert relative_rmse(one, true) <= 1.3 * relative_rmse(other, true) + 1e-6


@pytest.mark.parametrize("dim", [slow_unless(d in (96, 256), d) for d in (64, 96, 128, 192, 256)])
def test_every_head_dimension_has_tiles_that_work(interpreted, dim):
    mask = AttentionMask(40, 140, is_causal=True)
    inputs = biased(mask, torch.float16, heads=1, groups=1, dim=dim)
    found = interpreted(attend, inputs, mask, dim**-0.5, is_fused=True)
    for one, true in zip(found, exact(inputs, mask, dim**-0.5), strict=True):
        assert relative_rmse(one, true) < 2e-3


def test_heads_that_share_keys_are_divided_until_every_processor_has_a_program():
    from megatron_asynchzp.attention.triton_backward import head_splits

    for num_heads in range(1, 33):
        for num_programs in (1, 3, 16, 131, 132, 1000):
            splits = head_splits(num_programs, num_heads, 132)
            fewer = [n for n in range(1, splits) if num_heads % n == 0]
            assert num_heads % splits == 0
            assert splits == num_heads or splits * num_programs >= 132
            assert all(n * num_programs < 132 for n in fewer)


def attend_with(num_processors: int, *arguments) -> tuple[torch.Tensor, ...]:
    """On a device of so many processors."""
    from unittest import mock

    from megatron_asynchzp.attention import triton_backward

    device = triton_backward._Device((9, 0), num_processors)
    with mock.patch.object(triton_backward._Device, "of", lambda _: device):
        return attend(*arguments, is_fused=True)


@pytest.mark.slow
def test_dk_and_dv_are_those_of_one_program_into_however_many_their_heads_are_divided(interpreted):
    """fp32 sums in another order, rounded once; dQ and the output do not know of it."""
    mask = AttentionMask(10, 130, is_causal=True)
    inputs = biased(mask, torch.float16, heads=12, groups=2)
    whole = interpreted(attend_with, 1, inputs, mask, SCALE)
    true = exact(inputs, mask, SCALE)
    for num_processors in (9, 1000):  # 4 programs: 3 and 6 parts
        parts = interpreted(attend_with, num_processors, inputs, mask, SCALE)
        for index, (one, other) in enumerate(zip(parts, whole, strict=True)):
            error, of_whole = (relative_rmse(x, true[index]) for x in (one, other))
            assert torch.equal(one, other) or (index > 2 and error <= 1.01 * of_whole + 1e-7)


def test_the_kernels_dq_does_not_depend_on_the_bias_of_k(interpreted):
    mask = AttentionMask(128, 256, is_causal=True)

    def dq_of(inputs: Inputs, scale: float) -> torch.Tensor:
        return interpreted(attend, inputs, mask, scale, is_fused=True)[2]

    assert growth_of_dq_error(dq_of, mask, torch.float16, dim=64, heads=1) <= 1.5


def test_garbage_in_padding_reaches_nobody(interpreted):
    mask = MASKS["packed, padded"]
    clean = biased(mask, torch.float16, heads=2, groups=2)
    dirty = with_garbage(clean, mask, float("inf"))
    found = interpreted(attend, dirty, mask, SCALE, is_fused=True)
    true = interpreted(attend, clean, mask, SCALE, is_fused=True)
    assert all(torch.equal(one, other) for one, other in zip(found, true, strict=True))
    for one, right in zip(found, exact(clean, mask, SCALE), strict=True):
        one, right = (x.masked_fill(x.isneginf(), 0) for x in (one, right))
        assert relative_rmse(one, right) < 2e-3


def _strided(inputs: Inputs, mask: AttentionMask) -> list[torch.Tensor]:
    """The same tensors as Megatron lays them out: length first, heads before channels."""
    seen = Inputs(*(x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in inputs))
    return attend(seen, mask, SCALE, is_fused=True)


def test_layout_and_repetition_change_no_bit(interpreted):
    mask = MASKS["causal, fewer queries"]
    inputs = biased(mask, torch.float16, batch=2, heads=2, groups=1)
    first = interpreted(attend, inputs, mask, SCALE, is_fused=True)
    for again in (
        interpreted(attend, inputs, mask, SCALE, is_fused=True),
        interpreted(_strided, inputs, mask),
    ):
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def _saved_bytes(length: int) -> int:
    """What autograd keeps for the backward of `length` queries and keys."""
    mask = AttentionMask(length, length, is_causal=True)
    inputs = biased(mask, torch.float16, heads=2, groups=1, dim=16)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    kept = {}

    def remember(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    from megatron_asynchzp.attention.pasa import block_attention

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        result = block_attention(AttentionCall(q, k, v, mask, SCALE), is_fused=True)
    assert result.output_BHSE.requires_grad
    return sum(kept.values())


def test_what_is_kept_for_backward_grows_by_the_same_bytes_with_every_key(interpreted):
    kept = [interpreted(_saved_bytes, length) for length in (256, 512, 1024)]
    assert kept[2] - kept[1] == 2 * (kept[1] - kept[0]) > 0


def _far_apart(inputs: Inputs, row_stride: int) -> Inputs:
    """The same tensors, each in address space of its own with `row_stride` elements from one row to
    the next. Only the pages that hold a row take memory."""
    spread = []
    for x in inputs:
        _, _, rows, channels = x.shape
        size = (rows - 1) * row_stride + channels
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        space = torch.frombuffer(mmap.mmap(-1, 2 * size, flags), dtype=x.dtype)
        far = space.as_strided(x.shape, (0, 0, row_stride, 1))
        far.copy_(x)
        spread.append(far)
    return Inputs(*spread)


def _attend_far_apart(inputs: Inputs, mask: AttentionMask, row_stride: int) -> list[torch.Tensor]:
    """O, dQ, dK, dV. Calls what autograd calls, which would make its inputs contiguous."""
    from megatron_asynchzp.attention.key_shift import BLOCK_SIZE, shift_keys
    from megatron_asynchzp.attention.triton_backward import fused_backward
    from megatron_asynchzp.attention.triton_forward import fused_forward

    q, k, v, d_output = _far_apart(inputs, row_stride) if row_stride else inputs
    call, ranges = AttentionCall(q, k, v, mask, SCALE), mask.key_ranges()
    keys = shift_keys(k, BLOCK_SIZE)._replace(keys_BGTD=k)
    output, lse = fused_forward(call, keys, ranges)
    return [output, *fused_backward(d_output, call, keys, output, lse, ranges)]


def test_rows_more_than_2_to_31_elements_apart_are_found(interpreted):
    mask = AttentionMask(260, 260, is_causal=True)
    inputs = biased(mask, torch.float16, heads=1, groups=1, dim=16)
    near = interpreted(_attend_far_apart, inputs, mask, 0)
    far = interpreted(_attend_far_apart, inputs, mask, 2**23 + 2**10)
    assert all(torch.equal(one, other) for one, other in zip(near, far, strict=True))
