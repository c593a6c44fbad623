# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's schedule without pipeline, with the loss per token, where groups of ranks have
different numbers of micro-batches: the run of stock Megatron that has all of them on one rank."""

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from scripts.testbed import megatron_runs
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import Steps, gpt_args, listening, run_pretrain
from tests.support.world import on_ranks

MOST = 8
Assignment = list[tuple[int, int]]
"""Of each data-parallel rank: micro-batches of its group, and how many of them are not empty."""


def assignments_of(sizes: tuple[int, int, int], ranks: int, steps: int, seed: int) -> list:
    """Of each step. Ranks that gather or reduce together have one number of micro-batches."""
    chance, together = random.Random(f"{sizes} {seed}"), max(sizes[:2])
    steps_of: list[Assignment] = []
    for _ in range(steps):
        assignment: Assignment = []
        for _ in range(ranks // together):
            most = chance.randint(1, MOST)
            full = [chance.choice([most, chance.randint(0, most)]) for _ in range(together)]
            assignment += [(most, one) for one in full]
        assignment[0] = assignment[0][0], max(1, assignment[0][1])
        steps_of.append(assignment)
    return steps_of


class Assigned:
    """Runs whose micro-batches are those of `assignments`, on their ranks or all on one."""

    def __init__(self, assignments: list[Assignment]):
        self._assignments, self._step = assignments, -1
        self._mine: list[tuple[int, bool]] = []  # number of a sequence; whether it counts

    def _begin_step(self) -> None:
        self._step += 1
        base = self._step * MOST * len(self._assignments[0])
        mine = [
            [(base + rank * MOST + index, index < full) for index in range(most)]
            for rank, (most, full) in enumerate(self._assignments[self._step])
        ]
        if dist.get_world_size() == 1:
            self._mine = [one for part in mine for one in part if one[1]]
        else:
            self._mine = mine[dist.get_rank()]

    def steps(self, argv: list[str]) -> Steps:
        forward_step, schedule = (
            megatron_runs._forward_step,
            schedules.forward_backward_no_pipelining,
        )
        dataset = megatron_runs.LineDataset(seq_length=32, vocab_size=128, seed=1)

        def forward_mine(_: Iterator, model: torch.nn.Module) -> tuple:
            number, counts = self._mine.pop(0)
            batch = {name: value[None] for name, value in dataset[number].items()}
            batch["loss_mask"] = batch["loss_mask"] * counts
            return forward_step(iter([batch]), model)

        def run_mine(**keywords: Any) -> Any:
            return schedule(**keywords | {"num_microbatches": len(self._mine)})

        with (
            mock.patch.object(megatron_runs, "_forward_step", forward_mine),
            mock.patch.object(schedules, "forward_backward_no_pipelining", run_mine),
            listening(self._begin_step, lambda _: None),
        ):
            record = run_pretrain(argv)
        return record.losses_and_norms


def run(argv: list[str], assignments: list[Assignment]) -> Steps:
    return Assigned(assignments).steps(argv)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["", "--bf16"])
@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 2, 4), (1, 2, 4), (1, 1, 1)])
def test_groups_with_different_numbers_of_micro_batches_train_as_one_rank(
    sizes: tuple[int, int, int], dtype: str
):
    """48 random assignments of 1 to 8 a setting."""
    assignments = assignments_of(sizes, 4, 48, seed=len(dtype))
    assert sum(len({most for most, _ in one}) > 1 for one in assignments) > 30
    line = gpt_args(
        *("--train-iters", "48", "--calculate-per-token-loss", "--lr", "1e-3"),
        *("--optimizer", "sgd", *filter(None, [dtype])),
    )
    (alone,) = on_ranks(run, 1, line, assignments)
    for found in on_ranks(run, 4, [*line, *size_flags(sizes)], assignments):
        for (loss, norm), (other_loss, other_norm) in zip(found, alone, strict=True):
            assert loss == pytest.approx(other_loss, rel=1e-6 if not dtype else 2e-3)
            assert norm == pytest.approx(other_norm, rel=1e-6 if not dtype else 2e-2)
