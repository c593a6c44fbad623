# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron DDP against --use-asynchzp on the same batches: what is compared, how, and how
far apart the two may be. Knows no shard sizes of its own.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch.distributed as dist

from megatron_asynchzp.testbed.megatron_flags import size_flags
from megatron_asynchzp.testbed.megatron_runs import RunRecord, gpt_args, run_pretrain

Sizes = tuple[int, int, int]
FP32_TOLERANCE = 1e-6
HALF_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Variant:
    """One configuration of Megatron that both sides run.

    samples_per_rank: global batch over data-parallel ranks, which is the number of micro-batches;
    model_ranks: tensor x pipeline parallel ranks of one model; overflows: the run must skip some
    steps, not all.
    """

    name: str
    flags: tuple[str, ...] = ()
    samples_per_rank: int = 1
    model_ranks: int = 1
    tolerance: float = FP32_TOLERANCE
    overflows: bool = False

    def argv(self, iterations: int) -> list[str]:
        batch = self.samples_per_rank * dist.get_world_size() // self.model_ranks
        return gpt_args(
            *("--train-iters", str(iterations), "--global-batch-size", str(batch)), *self.flags
        )


@dataclass
class Comparison:
    """How one pair of runs differed; relative errors over all steps."""

    variant: str
    sizes: Sizes
    loss_error: float
    grad_norm_error: float
    tolerance: float
    ranks: int
    steps: int
    faults: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        errors = (self.loss_error, self.grad_norm_error)
        return all(error <= self.tolerance for error in errors) and not self.faults


def _worst(ours: Sequence[float | None], stock: Sequence[float | None]) -> float:
    """Largest relative difference; infinite where only one side has a number, or one is NaN."""
    worst = 0.0
    for mine, theirs in zip(ours, stock, strict=True):
        if mine is None or theirs is None:
            error = 0.0 if mine is theirs else float("inf")
        else:
            error = abs(mine - theirs) / max(abs(theirs), 1e-30)
        worst = max(worst, error if isfinite(error) else float("inf"))
    return worst


def compare_records(
    variant: Variant, sizes: Sizes, ours: RunRecord, stock: RunRecord
) -> Comparison:
    result = Comparison(
        variant.name,
        sizes,
        _worst(ours.losses, stock.losses),
        _worst(ours.grad_norms, stock.grad_norms),
        variant.tolerance,
        dist.get_world_size(),
        len(stock.steps),
    )
    if "--eval-iters" in variant.flags and stock.validation_loss is None:
        result.faults.append("the stock run evaluated nothing")
    if stock.validation_loss is not None:
        error = _worst([ours.validation_loss], [stock.validation_loss])
        result.loss_error = max(result.loss_error, error)
    for what in ("is_skipped", "loss_scale", "learning_rate"):
        mine, theirs = ([getattr(s, what) for s in r.steps] for r in (ours, stock))
        if mine != theirs:
            result.faults.append(f"{what}: {mine} against {theirs}")
    if variant.overflows and {step.is_skipped for step in stock.steps} != {True, False}:
        result.faults.append("the stock run skipped no step or all: no overflow was tested")
    # A sum that cancels to zero in one order of additions need not in another: a few may differ,
    # and more where gradients are rounded to 16 bits first.
    zeros = [[step.num_zeros or 0 for step in run.steps] for run in (ours, stock)]
    is_fp32 = variant.tolerance == FP32_TOLERANCE
    if is_fp32 and any(abs(a - b) > 8 + 0.01 * b for a, b in zip(*zeros, strict=True)):
        result.faults.append(f"zeros in the gradients: {zeros[0]} against {zeros[1]}")
    if not stock.losses[-1] < stock.losses[0]:
        result.faults.append("the stock run learned nothing, so this proves nothing")
    return result


def compare(cases: Sequence[tuple[Variant, Sequence[Sizes]]], iterations: int) -> list[Comparison]:
    """Run every variant once with stock DDP and once per sizes. For all ranks of a world."""
    results = []
    for variant, all_sizes in cases:
        argv = variant.argv(iterations)
        stock = run_pretrain(argv)
        for sizes in all_sizes:
            ours = run_pretrain([*argv, *size_flags(sizes)])
            results.append(compare_records(variant, sizes, ours, stock))
    return results


def assert_equal_runs(results: Sequence[Comparison]) -> None:
    """Fail with every differing pair; append all to the file ASYNCHZP_PARITY_LOG, if set."""
    assert results
    if log := os.environ.get("ASYNCHZP_PARITY_LOG"):
        with open(log, "a") as file:
            for result in results:
                file.write(json.dumps(vars(result)) + "\n")
    different = [vars(result) for result in results if not result.is_equal]
    assert not different, f"{len(different)} of {len(results)} runs differ: {different}"
