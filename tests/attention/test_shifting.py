# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The constants of the paper, and the property that they are solved for."""

from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.testbed.attention.shifting import (
    INITIAL_BETAS,
    mean_gain,
    recovery_factor,
    shifting_matrix,
    solve_beta,
)

PUBLISHED = {
    64: (0.9375, 0.96875, 0.984619),
    128: (0.9375, 0.968994, 0.984497),
    256: (0.937744, 0.968872, 0.984436),
}
WITH_SCALE_OF_128 = (0.9374311, 0.9689529, 0.9847111)


@pytest.mark.parametrize("block_size", PUBLISHED)
def test_the_published_solver_gives_the_published_table(block_size):
    solved = [solve_beta(start, block_size) for start in INITIAL_BETAS]
    assert solved == pytest.approx(PUBLISHED[block_size], abs=5e-7)


def test_the_recovery_factors_of_blocks_of_128_are_those_of_the_paper():
    factors = [recovery_factor(solve_beta(start, 128)) for start in INITIAL_BETAS]
    assert factors == pytest.approx([15, 31.25, 63.5], abs=5e-3)


def test_with_the_scale_of_128_channels_beta_is_another():
    solved = [solve_beta(start, 128, head_dim=128) for start in INITIAL_BETAS]
    assert solved == pytest.approx(WITH_SCALE_OF_128, abs=5e-8)


def test_a_scale_that_is_a_power_of_two_changes_nothing():
    for start in INITIAL_BETAS:
        assert solve_beta(start, 128, head_dim=64) == solve_beta(start, 128)


def test_the_published_beta_misses_the_mean_gain_by_a_percent_at_128_channels():
    errors = [
        abs(mean_gain(128, beta, 1 / sqrt(128)) / (1 - beta) - 1)
        for beta in (solve_beta(start, 128) for start in INITIAL_BETAS)
    ]
    assert errors == pytest.approx([1.1e-3, 1.3e-3, 1.4e-2], rel=0.05)


@settings(max_examples=30)
@given(
    start=st.floats(0.5, 0.99),
    block_size=st.integers(2, 300),
    head_dim=st.sampled_from([None, 64, 96, 128, 256]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_a_solved_beta_is_one_minus_what_the_rounded_matrix_keeps_of_a_mean(
    start, block_size, head_dim, dtype
):
    try:
        beta = solve_beta(start, block_size, head_dim, dtype)
    except (
        ValueError
    ) as error:  # rounding may leave no fixed point: an error, never an approximation
        assert "no fixed point" in str(error)
        return
    scale = 1 if head_dim is None else 1 / sqrt(head_dim)
    if head_dim is None:
        kept = mean_gain(block_size, beta, None, dtype)
    else:
        rows = shifting_matrix(block_size, beta, scale, dtype).double().sum(1)
        assert rows.unique().numel() == 1
        kept = rows[0].item() / scale
    assert kept == pytest.approx(1 - beta, abs=1e-12)


def test_an_unrounded_matrix_keeps_one_minus_beta_of_the_mean_and_all_of_the_rest():
    matrix = shifting_matrix(5, 0.9, 0.5, torch.float64)
    column = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    assert torch.allclose(matrix @ column, 0.5 * (column - 0.9 * 3))


@pytest.mark.parametrize("start", [-0.5, 0.0, 1.0, 2.0])
def test_a_beta_outside_zero_and_one_is_refused(start):
    with pytest.raises(ValueError, match="between 0 and 1"):
        solve_beta(start)
