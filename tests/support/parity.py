# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron DDP against --use-asynchzp on the same batches: what is compared, how, and how
far apart the two may be. Knows no shard sizes of its own.

[Note: bounds] In fp32 the two differ by the order of additions, 1e-7. So they do in the first step
of a bf16 or fp16 run, whose gradients both sum in fp32. In later steps that difference now and then
flips the last bit of a weight, and training amplifies it: two stock runs that add in different
orders come apart as well. How far is recorded by tests/mcore/stock_noise.py for each configuration,
and a small multiple of it is allowed.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from scripts.report.records import read_record
from scripts.testbed.differences import worst_difference
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import RunRecord, gpt_args, run_pretrain

Sizes = tuple[int, int, int]
FP32_TOLERANCE = 1e-6
# Without apex stock Megatron computes the norm of fp16 parameters in fp16.
FP16_NORM_ROUNDING = 2.0**-10
# Ours is one more way to add: it may be an unlucky one among those that were recorded.
NOISE_MULTIPLE = 3.0
# Far more than the toy models need.
KEEP = ("--asynchzp-keep-params-gb", "0.01", "--asynchzp-keep-grads-gb", "0.01")


@dataclass(frozen=True)
class Variant:
    """One configuration of Megatron that both sides run.

    samples_per_rank: global batch over data-parallel ranks, which is the number of micro-batches;
    model_ranks: tensor x pipeline parallel ranks of one model; is_noisy: bounds follow from what
    two stock runs differ by, see [Note: bounds]; overflows: the run must skip some steps, not all;
    ours: further flags of the run with --use-asynchzp.
    """

    name: str
    flags: tuple[str, ...] = ()
    samples_per_rank: int = 1
    model_ranks: int = 1
    is_noisy: bool = False
    overflows: bool = False
    ours: tuple[str, ...] = ()

    @property
    def is_fp32(self) -> bool:
        return not {"--bf16", "--fp16"} & set(self.flags)

    def argv(self, iterations: int) -> list[str]:
        batch = self.samples_per_rank * dist.get_world_size() // self.model_ranks
        return gpt_args(
            *("--train-iters", str(iterations), "--global-batch-size", str(batch)),
            "--log-params-norm",
            *self.flags,
        )


@dataclass
class Comparison:
    """How one pair of runs differed; relative errors over all steps. more_losses: auxiliary ones of
    routers and those of further predicted tokens, by rank and layer."""

    variant: str
    sizes: Sizes
    loss_error: float
    grad_norm_error: float
    params_norm_error: float
    more_losses_error: float
    loss_tolerance: float
    tolerance: float
    ranks: int
    steps: int
    faults: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        is_close = self.loss_error <= self.loss_tolerance and self.grad_norm_error <= self.tolerance
        return is_close and not self.faults


class Bounds(NamedTuple):
    """Largest relative differences, over all steps, that are allowed."""

    loss: float = FP32_TOLERANCE
    grad_norm: float = FP32_TOLERANCE


def bounds_of(variant: Variant, steps: int) -> Bounds:
    """Those of a run of `steps`, or more, on whatever ranks: in which step of which world the first
    bit flips is chance, how far it leads is the configuration's.

    Raises LookupError where the noise of a noisy variant was not recorded.
    """
    if not variant.is_noisy:
        return Bounds()
    rows = [row for row in read_record("stock_noise").lines if row["steps"] >= steps]
    rows = [row for row in rows if row["configuration"] == variant.name]
    if not rows:
        raise LookupError(
            f"the record stock_noise has no {variant.name!r} of {steps} steps: "
            "run python -m scripts.report.measure_again --only stock_noise"
        )
    worst = [max(row[key] for row in rows) for key in ("worst_loss", "worst_grad_norm")]
    return Bounds(*(max(FP32_TOLERANCE, NOISE_MULTIPLE * error) for error in worst))


def compare_records(
    variant: Variant, sizes: Sizes, ours: RunRecord, stock: RunRecord
) -> Comparison:
    ranks, steps = dist.get_world_size(), len(stock.steps)
    bounds = bounds_of(variant, steps)
    result = Comparison(
        variant.name,
        sizes,
        worst_difference(ours.losses, stock.losses),
        worst_difference(ours.grad_norms, stock.grad_norms),
        worst_difference(ours.params_norms, stock.params_norms),
        _worst_of_more_losses(ours, stock),
        bounds.loss,
        bounds.grad_norm,
        ranks,
        steps,
    )
    if (error := _first_step_error(ours, stock)) > FP32_TOLERANCE:
        result.faults.append(f"the first step that changes the weights differs by {error:.1e}")
    if result.params_norm_error > (
        FP16_NORM_ROUNDING if "--fp16" in variant.flags else bounds.loss
    ):
        result.faults.append("the norms of the parameters differ")
    if result.more_losses_error > bounds.loss:
        result.faults.append("auxiliary losses or those of further tokens differ")
    has_more_losses = {"--mtp-num-layers", "--moe-aux-loss-coeff"} & set(variant.flags)
    if has_more_losses and not stock.steps[0].more_losses:
        result.faults.append("the stock run has no auxiliary or prediction losses")
    if "--eval-iters" in variant.flags and stock.validation_loss is None:
        result.faults.append("the stock run evaluated nothing")
    if stock.validation_loss is not None:
        error = worst_difference([ours.validation_loss], [stock.validation_loss])
        result.loss_error = max(result.loss_error, error)
    for what in ("is_skipped", "loss_scale", "learning_rate"):
        mine, theirs = ([getattr(s, what) for s in r.steps] for r in (ours, stock))
        if mine != theirs:
            result.faults.append(f"{what}: {mine} against {theirs}")
    if variant.overflows and {step.is_skipped for step in stock.steps} != {True, False}:
        result.faults.append("the stock run skipped no step or all: no overflow was tested")
    # A sum that cancels to zero in one order of additions need not in another (the gradient of a
    # key's bias is nothing but rounding): a few may differ, and more where gradients are rounded to
    # 16 bits first.
    zeros = [[step.num_zeros or 0 for step in run.steps] for run in (ours, stock)]
    if variant.is_fp32 and any(abs(a - b) > 16 + 0.01 * b for a, b in zip(*zeros, strict=True)):
        result.faults.append(f"zeros in the gradients: {zeros[0]} against {zeros[1]}")
    if not stock.losses[-1] < stock.losses[0]:
        result.faults.append("the stock run learned nothing, so this proves nothing")
    return result


def _worst_of_more_losses(ours: RunRecord, stock: RunRecord) -> float:
    """Infinite where one side has a loss that the other has not."""
    worst = 0.0
    for mine, theirs in zip(ours.steps, stock.steps, strict=True):
        if mine.more_losses.keys() != theirs.more_losses.keys():
            return float("inf")
        for name, values in theirs.more_losses.items():
            worst = max(worst, worst_difference(mine.more_losses[name], values))
    return worst


def _first_step_error(ours: RunRecord, stock: RunRecord) -> float:
    """Until weights are updated, rounded gradients have flipped no bit: see [Note: bounds]."""
    changed = (i for i, step in enumerate(stock.steps) if not step.is_skipped)
    until = next(changed, len(stock.steps) - 1) + 1
    return max(
        worst_difference(ours.losses[:until], stock.losses[:until]),
        worst_difference(ours.grad_norms[:until], stock.grad_norms[:until]),
    )


def compare(cases: Sequence[tuple[Variant, Sequence[Sizes]]], iterations: int) -> list[Comparison]:
    """Run every variant once with stock DDP and once per sizes. For all ranks of a world."""
    results = []
    for variant, all_sizes in cases:
        argv = variant.argv(iterations)
        stock = run_pretrain(argv)
        for sizes in all_sizes:
            ours = run_pretrain([*argv, *size_flags(sizes), *variant.ours], inspect=_what_was_kept)
            results.append(compare_records(variant, sizes, ours, stock))
            if variant.ours == KEEP and not (ours.inspected and all(ours.inspected)):
                results[-1].faults.append("nothing was kept, so this proves nothing")
    return results


def _what_was_kept(chunks: Any, _: Any) -> list[int]:
    """How many gathers, and how many reductions, were saved in the last step."""
    return [saved for saved, _ in chunks[0].communication.kept().values()]


def assert_equal_runs(results: Sequence[Comparison]) -> None:
    """Fail with every differing pair; append all to the file ASYNCHZP_PARITY_LOG, if set."""
    assert results
    if log := os.environ.get("ASYNCHZP_PARITY_LOG"):
        with open(log, "a") as file:
            for result in results:
                file.write(json.dumps(vars(result)) + "\n")
    different = [vars(result) for result in results if not result.is_equal]
    assert not different, f"{len(different)} of {len(results)} runs differ: {different}"
