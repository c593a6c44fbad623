# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The grids by which the stand-in for Transformer Engine quantises, held against their definitions:
every code by the list of all 256, scales by exact fractions."""

import math
from fractions import Fraction

import pytest
import torch

from scripts.testbed.te import formats
from scripts.testbed.te.formats import E4M3, E5M2, Grid

TENSOR = Grid(None, None)
TILES = Grid(128, 128, "power")
ROWS = Grid(1, 128, "power")
MX_ROWS, MX_COLUMNS = Grid(1, 32, "e8m0"), Grid(32, 1, "e8m0")
GRIDS = [TENSOR, TILES, ROWS, MX_ROWS, MX_COLUMNS]


def numbers(*shape: int, spread: float = 6.0) -> torch.Tensor:
    """Of magnitudes from 10**-spread to 10, bf16."""
    made = torch.Generator().manual_seed(math.prod(shape))
    exponents = torch.empty(shape).uniform_(-spread, 1, generator=made)
    return (torch.randn(shape, generator=made) * 10**exponents).bfloat16()


def nearest_code(value: float, dtype: torch.dtype) -> int:
    """Of two that are as near the one with an even last bit, beyond the largest the largest."""
    codes = torch.arange(256, dtype=torch.uint8)
    known = [(code, v) for code, v in enumerate(codes.view(dtype).tolist()) if math.isfinite(v)]
    distance = {code: abs(Fraction(v) - Fraction(value)) for code, v in known}
    signed = [code for code, _ in known if (code < 128) == (math.copysign(1, value) > 0)]
    return min(signed, key=lambda code: (distance[code], code % 2))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_code_is_the_nearest_of_all_with_ties_to_even_and_none_beyond_the_largest(dtype):
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].sort().values
    between = (values[1:] + values[:-1]) / 2  # ties
    tried = torch.cat([values[::7], between[::5], numbers(40).float(), torch.tensor([1e6, -1e6])])
    codes = formats.cast(tried, torch.ones(()), dtype)
    assert codes.tolist() == [nearest_code(value, dtype) for value in tried.tolist()]


def of_power(grid: Grid, scale: float) -> Fraction:
    """The scale that a code was multiplied with, of what is kept of it."""
    return 1 / (Fraction(2) ** (int(scale) - 127) if grid.kind == "e8m0" else Fraction(scale))


@pytest.mark.parametrize("grid", [TILES, ROWS, MX_ROWS, MX_COLUMNS])
def test_a_scale_of_two_is_the_largest_by_which_no_magnitude_leaves_the_range(grid: Grid):
    x = numbers(256, 256)
    amax = formats.amax_of_blocks(x, grid)
    kept = formats.encode(x, grid, E4M3).inverse
    for of_block, inverse in zip(amax.flatten().tolist(), kept.flatten().tolist()):
        scale = of_power(grid, inverse)
        # The reciprocal of 448 is rounded before MXFP8 multiplies with it.
        assert Fraction(of_block) * scale <= 448 * (1 + Fraction(1, 2**22))
        assert Fraction(of_block) * scale * 2 > 448 * (1 - Fraction(1, 2**22))


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan")])
def test_magnitudes_without_a_scale_leave_values_as_they_are(amax: float):
    for is_power in (False, True):
        assert formats.scale_of(torch.tensor(amax), 448.0, is_power).item() == 1.0


@pytest.mark.parametrize("grid", GRIDS)
def test_values_come_back_within_half_a_step_and_the_same_when_they_are_quantised_again(grid):
    x = numbers(160, 96, spread=1.0)
    coded = formats.encode(x, grid, E4M3)
    back = formats.decode(coded, grid, E4M3)
    # e4m3 has four bits, and steps of 2**-9 below 2**-6; block scales leave a factor of two.
    top = formats.spread(formats.amax_of_blocks(x, grid), grid, x.shape)
    bound = torch.maximum(x.float().abs() / 16, top * 2**-17)
    assert ((back - x.float()).abs() <= bound).all()
    again = formats.encode(back.bfloat16(), grid, E4M3)
    assert torch.equal(formats.decode(again, grid, E4M3), back) or grid == TENSOR
