# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The formats of weights on the wire: a layer makes the same codes and scales of what arrives, for
every largest magnitude of a block and every bf16 value below it."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_asynchzp.engine.comm.block_formats import BlockFormat, Blocks, Mxfp8, Nvfp4, ScaledFp8
from tests.support.selection import slow_unless

NUM_FINITE = 0x7F80  # bf16 numbers from 0 on


def bf16_of(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def there_and_back(
    form: BlockFormat, values: torch.Tensor, amax: torch.Tensor, whole: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels and codes of blocks, a row of values each, and what is decoded of them, in bf16."""
    levels = form.levels(amax.float(), whole)

    def spread(of_blocks: torch.Tensor) -> torch.Tensor:
        return of_blocks.repeat_interleave(values.shape[1])

    blocks = Blocks(levels, whole, spread)
    codes = form.encode(values.reshape(-1), blocks)
    factors, scale = form.factors(levels, whole)
    decoded = torch.empty_like(values.reshape(-1), dtype=torch.bfloat16)
    form.decode(codes, spread(factors), scale, decoded)
    return levels, codes.view(len(values), -1), decoded.view(values.shape)


@pytest.mark.parametrize("step", [slow_unless(True, 97), slow_unless(False, 1)])
def test_an_mxfp8_block_comes_back_with_its_exponent_and_its_codes(step):
    form, none = Mxfp8(1, 32), torch.zeros(())
    finite, pairs, others = bf16_of(torch.arange(NUM_FINITE)), 0, list[float]()
    for index in range(NUM_FINITE - 1, -1, -step):
        values = finite[: index + 1].view(1, -1)
        levels, codes, decoded = there_and_back(form, values, values[:, -1], none)
        again, codes_again, _ = there_and_back(form, decoded, decoded.amax(1), none)
        pairs += index + 1
        if not (torch.equal(levels, again) and torch.equal(codes, codes_again)):
            others.append(float(finite[index]))
    assert pairs == pytest.approx(532_701_120 / step, rel=0.01)
    # The scale of the largest is beyond the largest exponent of bf16.
    assert len(others) <= 8 and all(amax > 3.29e38 for amax in others)


def nvfp4_blocks_that_differ(
    form: Nvfp4, exponents: range, mantissas: range, stride: int
) -> tuple[Counter[str], float]:
    """Values, blocks and those of them that come back with another scale or other codes; the
    largest magnitude of such a block, relative to its weight's."""
    counts, highest = Counter[str](), 0.0
    offsets = torch.arange(0, 6 * 128, dtype=torch.int32)
    for bits in (exponent << 7 | mantissa for exponent in exponents for mantissa in mantissas):
        largest = bf16_of(torch.tensor([bits]))
        _, _, arrived = there_and_back(
            form, largest.repeat(2).view(1, 2), largest, whole := largest.float()[0]
        )
        whole_again = arrived.float().max()
        amaxes = torch.arange(max(bits - 30 * 128, 0), bits + 1, stride)
        for some in amaxes.split(512):
            values = bf16_of((some.int()[:, None] - offsets).clamp_min(0))
            levels, codes, decoded = there_and_back(form, values, values[:, 0], whole)
            again, codes_again, _ = there_and_back(form, decoded, decoded.amax(1), whole_again)
            has_scale = levels > 0  # else all of it is 0, whatever the codes
            differs = (levels != again) | ((codes != codes_again).any(1) & has_scale)
            counts["values"] += values.numel()
            counts["blocks"] += len(some)
            counts["differ"] += int(differs.sum())
            if differs.any():
                highest = max(highest, float((values[:, 0].float()[differs] / whole).max()))
    return counts, highest


@pytest.mark.parametrize(
    ("exponents", "mantissas", "stride"),
    [
        slow_unless(True, range(120, 121), range(0, 128, 17), 7, id="sample"),
        slow_unless(False, range(120, 121), range(128), 1, id="all mantissas"),
    ],
)
def test_an_nvfp4_block_comes_back_with_its_scale_and_its_codes(exponents, mantissas, stride):
    found, highest = nvfp4_blocks_that_differ(Nvfp4(16, 16), exponents, mantissas, stride)
    print(found, highest)
    assert found["values"] > (1_000_000 if stride > 1 else 377_000_000)
    # Their largest is a tie between two of the least scales.
    assert found["differ"] <= 4 and highest < 1.1e-5


def test_every_code_of_four_bits_comes_back_with_its_sign():
    form, whole = Nvfp4(1, 16), torch.tensor(6.0 * 448)
    values = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, 0])
    _, codes, decoded = there_and_back(
        form, 448 * values.bfloat16().view(1, -1), torch.tensor([6 * 448.0]), whole
    )
    assert torch.equal(decoded.float()[0], 448 * values)
    assert len(set(codes.flatten().tolist())) == 8


@pytest.mark.parametrize("form", [Mxfp8(1, 32), Nvfp4(16, 16)])
def test_what_is_not_finite_does_not_arrive_as_a_number(form: BlockFormat):
    values = torch.ones(1, 32).bfloat16()
    for odd in (torch.nan, torch.inf, -torch.inf):
        values[0, 5] = odd
        amax = values.abs().amax(1).float()
        whole = amax[0].nan_to_num(torch.inf, torch.inf)
        _, _, decoded = there_and_back(form, values, amax, whole)
        assert not decoded[0, 5].isfinite()


class _FromHost(TorchDispatchMode):
    """Fails where a tensor is made of numbers on the host: on a device the copy holds the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.lift_fresh.default, "a tensor of numbers on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "form", [ScaledFp8(), ScaledFp8(128, 128, True), Mxfp8(1, 32), Nvfp4(16, 16)]
)
def test_coding_copies_nothing_from_the_host(form):
    values = torch.linspace(-3.0, 5.0, 64).bfloat16().view(2, 32)
    amax, whole = values.abs().amax(1), values.abs().amax().float()
    with _FromHost():
        there_and_back(form, values, amax, whole)


def test_the_exponent_of_an_mxfp8_block_is_the_least_whose_scale_covers_its_largest_magnitude():
    powers = [-126.0, -125.0, -3.0, 0.0, 7.0, 119.0]
    covered = torch.tensor([448 * 2.0**power for power in powers])
    form, none = Mxfp8(1, 32), torch.zeros(())
    assert form.levels(covered, none).tolist() == [127 + power for power in powers]
    above = form.levels(covered * (1 + 2.0**-7), none).tolist()
    assert above == [128 + power for power in powers]
    # Subnormal scales are 2 ** -127 or the least normal one; infinity and NaN as the layers do.
    edges = [0.0, 448 * 2.0**-127, 448 * 2.0**-127 * 1.25, torch.inf, torch.nan]
    assert form.levels(torch.tensor(edges), none).tolist() == [0, 0, 1, 254, 255]


@pytest.mark.parametrize(
    ("form", "fitting", "other"),
    [
        (Mxfp8(1, 32), [(64, 96)], [(64, 80), (80, 64), (64,), (2, 64, 64)]),
        (Mxfp8(32, 1), [(64, 96)], [(64, 80), (80, 64)]),
        (Nvfp4(16, 16), [(48, 16)], [(48, 24), (24, 48)]),
        (ScaledFp8(128, 128), [(130, 7)], [(128,)]),
        (ScaledFp8(), [(5,), (2, 3, 4)], []),
    ],
)
def test_weights_that_layers_take_in_a_format_travel_in_it_and_no_others(form, fitting, other):
    assert all(map(form.fits, fitting)) and not any(map(form.fits, other))
