# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks unlike the others: one that owns nothing but padding, one with a broken gradient."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from scripts.testbed.megatron_flags import FP16
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from scripts.testbed.ranks import RankFailure, run_ranks
from tests.support.parity import size_flags
from tests.support.world import is_torchrun, on_ranks


def run_with_nothing_on_the_last_rank() -> int:
    from megatron_asynchzp.mcore.step.optimizer import ShardedParameters

    add = ShardedParameters._add

    def add_unless_last(self: ShardedParameters, chunk, unit) -> None:
        self.by_unit[unit] = []
        if dist.get_rank() < dist.get_world_size() - 1:
            add(self, chunk, unit)

    with mock.patch.object(ShardedParameters, "_add", add_unless_last):
        return len(
            run_pretrain(gpt_args("--train-iters", "2", *FP16, *size_flags((2, 1, 2)))).steps
        )


def test_a_rank_that_owns_no_element_still_steps_clips_and_unscales_with_the_others():
    assert on_ranks(run_with_nothing_on_the_last_rank, 2) == [2] * 2


def run_with_a_bad_gradient() -> None:
    from megatron_asynchzp.engine.zero import reductions
    from megatron_asynchzp.engine.zero.unit import HZPUnit

    take_grads = reductions.take_grads

    def poisoned(unit: HZPUnit, indices: Iterable[int], *places: Any) -> None:
        if dist.get_rank() == 1 and unit.params[0].grad is not None:
            unit.params[0].grad.view(-1)[0] = float("nan")
        take_grads(unit, indices, *places)

    with mock.patch.object(reductions, "take_grads", poisoned):
        argv = gpt_args("--train-iters", "2", "--rerun-mode", "disabled")
        run_pretrain([*argv, *size_flags((2, 2, 2))])


@pytest.mark.skipif(is_torchrun(), reason="the fault would end the ranks that pytest runs on")
def test_a_gradient_that_is_not_a_number_stops_the_run_before_it_reaches_the_weights():
    with pytest.raises(RankFailure, match="found NaN in the gradient shard of unit"):
        run_ranks(run_with_a_bad_gradient, 2)
