# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A run that is saved and resumed goes on as if nothing had happened: bitwise with the same sizes,
to rounding with any others, and from and to stock Megatron."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.megatron_flags import BF16, FP16, FULL_RECOMPUTE, MIXTURE_OF_EXPERTS, UNTIED
from tests.mcore.checkpoint.test_moments import ROUNDED
from tests.mcore.test_parity import INTERLEAVED, PIPELINE, TENSOR, TWO_EXPERT_RANKS
from tests.support.checkpoints import (
    NUM_STEPS,
    RESHARDABLE,
    SAVED_AT,
    Job,
    find_differences,
    read_tensors,
)
from tests.support.selection import slow_unless, some_and_rest
from tests.support.world import on_ranks

SWIGLU = ("--swiglu", "--group-query-attention", "--num-query-groups", "2", "--disable-bias-linear")
# Not that of hidden states: on the CPU platform it draws from the generator that torch's DataLoader
# also uses, once per start.
DROPOUT = ("--attention-dropout", "0.1")
TOLERANCE, HALF_TOLERANCE = 1e-6, 2e-3

KEEP_SOME = ("--asynchzp-keep-grads-gb", "0.0003", "--global-batch-size")

SAME_SIZES = {
    "fp32": Job((2, 1, 4)),
    "bf16, dropout": Job((2, 4, 4), (*BF16, *DROPOUT)),
    "fp16": Job((1, 2, 2), tuple(FP16)),
    "nothing gathered": Job((1, 1, 1), tuple(BF16)),
    "gated, recomputed": Job((4, 2, 4), (*SWIGLU, *FULL_RECOMPUTE)),
    "tensor parallel, gated, untied": Job((2, 1, 2), (*TENSOR, *SWIGLU, *UNTIED)),
    "interleaved pipeline, bf16": Job((2, 1, 2), (*INTERLEAVED, *BF16)),
    "experts on 2 ranks, bf16": Job((2, 4, 4), (*TWO_EXPERT_RANKS, *BF16)),
    "sgd": Job((2, 2, 4), ("--optimizer", "sgd", "--lr", "0.1")),
    # 6 micro-batches on each rank, and memory for the gradients of some layers.
    "gradients kept, interleaved pipeline, bf16, dropout": Job(
        (1, 2, 2), (*INTERLEAVED, *BF16, *DROPOUT, *KEEP_SOME, "12")
    ),
    "gradients kept": Job((1, 2, 4), (*KEEP_SOME, "12")),
    "adam with moments in bf16": Job((2, 1, 2), ROUNDED),
    "saved beside training": Job(
        (2, 2, 4),
        (*BF16, "--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"),
    ),
}


def resume_all(jobs: dict[str, Job], folder: Path) -> dict[str, tuple]:
    output = {}
    for number, (name, job) in enumerate(jobs.items()):
        directory = folder / str(number)
        whole, rest = job.train_and_save(directory), job.resume(directory)
        states = zip(whole.inspected, rest.inspected, strict=True)
        output[name] = (
            whole.steps[SAVED_AT:],
            rest.steps,
            all(torch.equal(*pair) for pair in states),
        )
    return output


def check_same_sizes(jobs: dict[str, Job], world_size: int, folder: Path) -> None:
    for output in on_ranks(resume_all, world_size, jobs, folder):
        for name, (whole, rest, is_same_state) in output.items():
            assert len(rest) == NUM_STEPS - SAVED_AT and rest == whole, name
            assert is_same_state, name


# That experts resume is in the fast case of the stock checkpoints.
FAST_SAME_SIZES = ["gradients kept, interleaved pipeline, bf16, dropout"]


@pytest.mark.parametrize("names", some_and_rest(SAME_SIZES, FAST_SAME_SIZES))
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(names, tmp_path):
    check_same_sizes({name: SAME_SIZES[name] for name in names}, 4, tmp_path)


# Saved on 4 ranks; resumed on the ranks of the key.
MOVES: dict[int, dict[Job, list[Job]]] = {
    4: {
        Job((2, 1, 4)): [
            Job((4, 4, 4)),
            Job((1, 1, 1)),
            Job((1, 2, 2), TENSOR),
            Job((2, 2, 2), PIPELINE),
            Job((1, 1, 1), (*TENSOR, *PIPELINE)),
        ],
        Job((2, 1, 2), (*TENSOR, *SWIGLU)): [
            Job((4, 2, 4), SWIGLU),
            Job((1, 1, 2), (*PIPELINE, *SWIGLU)),
        ],
        Job((1, 2, 2), (*PIPELINE, *UNTIED)): [
            Job((2, 4, 4), tuple(UNTIED)),
            Job((2, 1, 2), (*TENSOR, *UNTIED)),
        ],
        Job((2, 2, 4), TWO_EXPERT_RANKS): [
            Job((4, 1, 4), tuple(MIXTURE_OF_EXPERTS)),
            Job((2, 2, 4), (*MIXTURE_OF_EXPERTS, "--expert-model-parallel-size", "4")),
        ],
    },
    2: {Job((2, 1, 4)): [Job((1, 2, 2)), Job((1, 1, 1), PIPELINE)]},
    8: {
        Job((2, 1, 4)): [Job((2, 4, 8)), Job((1, 2, 2), (*TENSOR, *PIPELINE))],
        Job((2, 2, 4), TWO_EXPERT_RANKS): [Job((4, 2, 8), TWO_EXPERT_RANKS)],
    },
}


def save_all(jobs: list[Job], folder: Path) -> list[tuple]:
    runs = [job.train_and_save(folder / str(index)) for index, job in enumerate(jobs)]
    return [(run.losses, run.grad_norms) for run in runs]


def move_all(moves: dict[Job, list[Job]], folder: Path) -> dict[tuple[int, Job], tuple]:
    output = {}
    for index, targets in enumerate(moves.values()):
        for target in targets:
            run = target.resume(folder / str(index))
            output[index, target] = run.losses, run.grad_norms
    return output


def check_moves(
    moves: dict[Job, list[Job]], world_size: int, folder: Path, tolerance: float
) -> None:
    whole = on_ranks(save_all, 4, list(moves), folder)[0]
    for output in on_ranks(move_all, world_size, moves, folder):
        assert len(output) == sum(map(len, moves.values()))
        for (origin, target), numbers in output.items():
            for ours, uninterrupted in zip(numbers, whole[origin], strict=True):
                expected = uninterrupted[SAVED_AT:]
                assert len(ours) == len(expected)
                assert ours == pytest.approx(expected, rel=tolerance), (list(moves)[origin], target)


@pytest.mark.parametrize("world_size", [slow_unless(False, 4), 2, slow_unless(False, 8)])
def test_a_run_resumes_on_other_sizes_and_other_numbers_of_ranks(world_size, tmp_path):
    check_moves(MOVES[world_size], world_size, tmp_path, TOLERANCE)


STOCK = {
    "ddp": Job(None, tuple(SWIGLU)),
    "ddp, bf16": Job(None, tuple(BF16)),
    "ddp, fp16": Job(None, tuple(FP16)),
    "distributed optimizer": Job(None, tuple(RESHARDABLE)),
    "distributed optimizer, bf16": Job(None, (*BF16, *RESHARDABLE)),
    "ddp, tensor parallel, bf16": Job(None, (*TENSOR, *SWIGLU, *BF16)),
    "ddp, experts on 2 ranks": Job(None, TWO_EXPERT_RANKS),
    "distributed optimizer, experts on 2 ranks, bf16": Job(
        None, (*TWO_EXPERT_RANKS, *BF16, *RESHARDABLE)
    ),
}
FAST_STOCK = ["distributed optimizer, experts on 2 ranks, bf16"]


def round_trip(names: list[str], folder: Path) -> dict[str, tuple]:
    output = {}
    for name in names:
        stock = STOCK[name]
        num_replicas = dist.get_world_size()
        has_model_ranks = "--tensor-model-parallel-size" in stock.flags
        sizes = (1, 2, 2) if has_model_ranks else (2, 1, num_replicas)
        flags = tuple(flag for flag in stock.flags if flag not in RESHARDABLE)
        ours = Job(sizes, flags)
        first, second, third = (folder / f"{name.replace(' ', '_')}{i}" for i in range(3))
        whole = stock.train_and_save(first)
        went_on = ours.resume(first)
        ours.load_and_save(first, second)
        came_back = stock.resume(second)
        stock.load_and_save(second, third)
        tensors = [read_tensors(directory) for directory in (first, second, third)]
        output[name] = (
            find_differences(tensors[0], tensors[1]),
            find_differences(tensors[0], tensors[2]) + sorted(set(tensors[2]) - set(tensors[0])),
            (whole.losses[SAVED_AT:], went_on.losses, came_back.losses),
        )
    return output


@pytest.mark.parametrize("world_size", [2, slow_unless(False, 4)])
def test_a_stock_checkpoint_goes_through_asynchzp_and_back_bit_by_bit(world_size, tmp_path):
    names = FAST_STOCK if world_size == 2 else list(STOCK)
    for output in on_ranks(round_trip, world_size, names, tmp_path):
        for name, (lost_in_ours, lost_on_return, losses) in output.items():
            assert not lost_in_ours and not lost_on_return, name
            whole, *others = losses
            is_half = {"--bf16", "--fp16"} & set(STOCK[name].flags)
            for ours_or_back in others:
                assert ours_or_back == pytest.approx(
                    whole, rel=HALF_TOLERANCE if is_half else TOLERANCE
                ), name


def change_padding(folder: Path) -> dict[str, list[float]]:
    """Megatron pads the vocabulary to a multiple that grows with the tensor parallel size."""
    padded = ("--make-vocab-size-divisible-by", "128")
    narrow, wide = folder / "narrow", folder / "wide"
    Job(None, padded).train_and_save(narrow)
    Job((2, 2, 2), (*padded, *TENSOR)).train_and_save(wide)
    return {
        "stock, wider": Job(None, (*padded, *TENSOR)).resume(narrow).losses,
        "ours, wider": Job((1, 2, 2), (*padded, *TENSOR)).resume(narrow).losses,
        "ours, wider, in two stages": Job((1, 1, 1), (*padded, *TENSOR, *PIPELINE))
        .resume(narrow)
        .losses,
        "stock, narrower": Job(None, padded).resume(wide).losses,
        "ours, narrower": Job((2, 2, 4), padded).resume(wide).losses,
    }


@pytest.mark.slow
def test_a_vocabulary_padded_to_another_size_is_read_as_stock_megatron_reads_it(tmp_path):
    for losses in on_ranks(change_padding, 4, tmp_path):
        assert losses["ours, wider"] == pytest.approx(losses["stock, wider"], rel=TOLERANCE)
        assert losses["ours, wider, in two stages"] == pytest.approx(
            losses["stock, wider"], rel=TOLERANCE
        )
        assert losses["ours, narrower"] == pytest.approx(losses["stock, narrower"], rel=TOLERANCE)
