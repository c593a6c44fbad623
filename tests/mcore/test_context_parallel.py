# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""States are sharded over data x context parallel ranks: with two of each, and three different
sizes, a run prints the losses and gradient norms of stock DDP on the same ranks."""

import pytest

from scripts.testbed.megatron_flags import UNTIED
from tests.support.parity import Sizes, Variant, assert_equal_runs, compare
from tests.support.world import on_ranks

# Megatron's local attention refuses context parallelism; both sides take PASA.
CONTEXT = ("--context-parallel-size", "2", "--use-pasa-attention", "--clip-grad", "0.5")
STEPS = 6


LOSS_PER_TOKEN = ("--calculate-per-token-loss", "--data-parallel-random-init")


def check(*cases: tuple[tuple[str, ...], list[Sizes]]) -> None:
    variants = [
        (Variant("context parallel", (*CONTEXT, *flags), model_ranks=2), all_sizes)
        for flags, all_sizes in cases
    ]
    assert_equal_runs(on_ranks(compare, 4, variants, STEPS, timeout_s=300)[0])


def test_states_are_sharded_over_data_and_context_parallel_ranks_as_in_stock():
    """(2, 1, 2) would also fit the two data-parallel ranks alone. Words that no sample has leave
    zeros in the gradient of an untied embedding. The loss is a mean over the ranks, and then per
    token, where ranks start differently."""
    check((tuple(UNTIED), [(2, 1, 2)]), ((*UNTIED, *LOSS_PER_TOKEN), [(1, 2, 4)]))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [tuple(UNTIED), LOSS_PER_TOKEN], ids=["untied", "per token"])
def test_each_kind_of_loss_and_of_start_is_that_of_stock_ddp(flags):
    check((flags, [(1, 2, 4), (2, 1, 2), (2, 2, 4)]))
