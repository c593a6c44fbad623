# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Sub-samples of different lengths, each on its own number of ranks (--hybrid-context-parallel):
losses and norms of one process of stock Megatron that runs all sub-samples one after another."""

import contextlib
import random
from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import schedules

from scripts.testbed import megatron_runs
from scripts.testbed.differences import worst_difference
from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS, UNTIED, size_flags
from scripts.testbed.megatron_runs import RunRecord, gpt_args, run_pretrain
from scripts.testbed.tiny_gpt import LineDataset
from tests.support.world import on_ranks

SEQ_LENGTH = 64
_UNITS = 8, 7  # what lengths are multiples of: the parts of a sub-sample on 4 ranks, or none
_BY_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")
HYBRID = ("--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank", "16")
# fmt: off
BASE = gpt_args(
    "--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH),
    "--calculate-per-token-loss", "--use-pasa-attention", "--dataloader-type", "single",
    "--num-workers", "0",
)
# fmt: on


class PackedDataset(LineDataset):
    """Samples of sub-samples, whose lengths are drawn from the index: long ones alone, too."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample, chance = super().__getitem__(index), random.Random(index * 31 + self._seed)
        ends, unit = [0], _UNITS[index % 2]
        while ends[-1] < SEQ_LENGTH:
            most = -(-(SEQ_LENGTH - ends[-1]) // unit)
            end = ends[-1] + unit * chance.choice([1, 1, most, chance.randint(1, most)])
            ends.append(min(end, SEQ_LENGTH))
        starts = torch.zeros(SEQ_LENGTH, dtype=torch.int64)
        for first, last in zip(ends, ends[1:], strict=False):
            starts[first:last] = first
        ends += [SEQ_LENGTH] * (SEQ_LENGTH // min(_UNITS) + 2 - len(ends))
        sample["position_ids"] = sample["position_ids"] - starts
        sample["loss_mask"] = (torch.arange(SEQ_LENGTH) % 5 > index % 3).float()
        return sample | {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)}


def _datasets(num_samples: Any, vp_stage: int | None = None) -> tuple:
    from megatron.training import get_args

    args: Any = get_args()
    make = partial(PackedDataset, SEQ_LENGTH, args.vocab_size)
    return make(seed=1), make(seed=2) if args.eval_iters else None, None


_datasets.is_distributed = True


def _forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple:
    """As in Megatron's own pretrain_gpt.py, with its functions."""
    from megatron.core import parallel_state as state
    from megatron.core import utils
    from megatron.training import get_args

    args: Any = get_args()
    names = (*_BY_TOKEN, "attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")
    tp_rank, batch = state.get_tensor_model_parallel_rank(), {}
    if tp_rank == 0:
        batch = next(data_iterator)
        for name in (*names, "local_cp_size", "hybrid_cp_group"):
            value = batch.get(name)
            batch[name] = None if value is None else value.cuda()
    batch = utils.get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=state.get_tensor_model_parallel_src_rank(),
        broadcast_group=state.get_tensor_model_parallel_group(),
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=False,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=1,
        seq_length=SEQ_LENGTH,
        mtp_on_this_rank=False,
        has_cu_seqlens=False,
        is_pipeline_first_stage=True,
        is_pipeline_last_stage=True,
    )
    params = None
    if args.hybrid_context_parallel:
        batch = utils.get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=True,
            cp_group=state.get_context_parallel_group(),
            hybrid_cp_group_func=state.get_hybrid_data_context_parallel_groups,
        )
        ends, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].item())
        params = PackedSeqParams(
            "thd", ends, ends, None, None, longest, longest, int(batch["local_cp_size"].item())
        )
        params.cp_group = batch["hybrid_cp_group"]
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=params,
    )
    return output, partial(megatron_runs._loss, batch["loss_mask"])


@contextlib.contextmanager
def _one_after_another() -> Iterator[None]:
    """In one process without the flag: each sub-sample is a micro-batch."""
    schedule = schedules.forward_backward_no_pipelining

    def run_all(data_iterator: Iterator, num_microbatches: int, **options: Any) -> Any:
        samples, num_parts = [], []
        for batch in (next(data_iterator) for _ in range(num_microbatches)):
            ends = sorted(set(batch["cu_seqlens"][0].tolist()))
            for first, last in zip(ends, ends[1:], strict=False):
                samples.append({name: batch[name][:, first:last] for name in _BY_TOKEN})
            num_parts.append(len(ends) - 1)
        options |= {"data_iterator": iter(samples), "num_microbatches": len(samples)}
        reports = iter(schedule(**options))
        # A report of each packed sample: with --sft an evaluation averages their means.
        return [
            {"lm loss": sum(report["lm loss"] for report in islice(reports, parts))}
            for parts in num_parts
        ]

    with mock.patch.object(schedules, "forward_backward_no_pipelining", run_all):
        yield


def run(argv: list[str]) -> RunRecord:
    is_hybrid = "--hybrid-context-parallel" in argv
    with (
        mock.patch.multiple(megatron_runs, _datasets=_datasets, _forward_step=_forward_step),
        contextlib.nullcontext() if is_hybrid else _one_after_another(),
    ):
        return run_pretrain(argv)


def run_each(lines: list[list[str]]) -> list[RunRecord]:
    return [run(line) for line in lines]


@cache
def alone(*flags: str) -> RunRecord:
    return on_ranks(run, 1, [*BASE, *flags])[0]


def check(found: RunRecord, expected: RunRecord, loss: float = 1e-6, norm: float = 1e-6) -> None:
    assert len(found.steps) == len(expected.steps) > 0
    assert worst_difference(found.losses, expected.losses) <= loss
    assert worst_difference(found.grad_norms, expected.grad_norms) <= norm
    if expected.validation_loss is not None:
        pair = [found.validation_loss], [expected.validation_loss]
        assert worst_difference(*pair) <= loss
    assert expected.losses[-1] < expected.losses[0]


SIZES = [(1, 1, 4), (2, 2, 4), (1, 2, 4), (4, 4, 4)]
ROPE = ("--position-embedding-type", "rope")
# fmt: off
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--disable-bias-linear",
          "--max-seqlen-per-dp-cp-rank", "32")
# fmt: on


def test_ranks_with_other_lists_of_sub_samples_train_and_evaluate_as_one_process():
    flags = (*ROPE, "--train-iters", "3", "--eval-iters", "1", "--lr", "1e-2", "--sft")
    line = [*BASE, *HYBRID, *flags, *size_flags((1, 2, 4))]
    for found in on_ranks(run, 4, line):
        check(found, alone(*flags))


_STEPS = ("--train-iters", "20", "--eval-iters", "2", "--eval-interval", "8")
_HYBRID_MODEL = ("--hybrid-layer-pattern", "*-*-", "--num-layers", "4", "--spec")
_HYBRID_MODEL += ("megatron_asynchzp.cpu_platform.local_hybrid", "local_hybrid_stack_spec")
# At 0.1 rounding grows from step 11 on: in step 19 the norms of two untied stock runs, which add in
# other orders, are 1e-6 apart, and ours 1.1e-5 from one process's.
_SGD = ("--optimizer", "sgd", "--lr", "0.03", "--min-lr", "0.003")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [(), _SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("more", [(), ROPE, tuple(UNTIED)], ids=["learned", "rope", "untied"])
def test_all_sizes_train_as_one_process(more, optimizer):
    flags = (*_STEPS, *more, *optimizer)
    lines = [[*BASE, *HYBRID, *flags, *size_flags(sizes)] for sizes in SIZES]
    for records in on_ranks(run_each, 4, lines, timeout_s=600):
        for found in records:
            check(found, alone(*flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, sizes, more",
    [
        (("--bf16",), (2, 2, 4), ()),
        ((), (1, 2, 2), TENSOR),
        (("--disable-bias-linear",), (2, 1, 2), TENSOR),
        (tuple(MIXTURE_OF_EXPERTS), (1, 1, 4), ()),
        (tuple(MIXTURE_OF_EXPERTS), (2, 2, 4), ("--expert-model-parallel-size", "2")),
        (ROPE, (2, 2, 4), ("--context-parallel-size", "2")),
        (ROPE, (1, 2, 4), ("--recompute-granularity", "selective")),
        ((*ROPE, *_HYBRID_MODEL), (2, 2, 4), ()),
    ],
    ids=[
        "bf16",
        "tensor",
        "tensor, P",
        "experts",
        "expert parallel",
        "context",
        "recomputed",
        "hybrid_model",
    ],
)
def test_other_models_and_layouts_train_as_one_process(model, sizes, more):
    own = ("--disable-bias-linear",) if more == TENSOR else ()
    flags = (*_STEPS, *model, *own)
    line = [*BASE, *HYBRID, *flags, *more, *size_flags(sizes)]
    bounds = (2e-3, 2e-2) if "--bf16" in model else (1e-6, 1e-6)
    for found in on_ranks(run, 4, line, timeout_s=600):
        check(found, alone(*flags), *bounds)


def _run_uneven(line: list[str]) -> RunRecord:
    """Each step in two groups without context parallelism, ranks of which have no sub-sample."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    def routed(self: Any, samples: list[tuple[int, int]], config: Any) -> tuple:
        numbers = [number for number, _ in samples]
        chance = random.Random(len(numbers))
        groups = [[[number] for number in numbers[:4]], [[], [], [], []]]
        for number in numbers[4:]:
            group = groups[chance.randrange(2)]
            group[chance.choice([0, 1, 1, 3])].append(number)
        return groups, groups

    with mock.patch.object(BalancedCPScheduler, "get_groups_and_subsamples", routed):
        return run(line)


@pytest.mark.slow
def test_ranks_without_a_sub_sample_in_a_group_train_as_one_process():
    flags = (*_STEPS, *ROPE)
    for sizes in SIZES:
        line = [*BASE, *HYBRID, *flags, *size_flags(sizes)]
        for found in on_ranks(_run_uneven, 4, line, timeout_s=300):
            check(found, alone(*flags))


def _resumed(folder: Path, flags: list[str]) -> list[list]:
    line = [*BASE, *HYBRID, *ROPE, "--train-iters", "8", *flags, *size_flags((2, 2, 4))]
    through = run([*line, "--save", str(folder), "--save-interval", "4"])
    resumed = run([*line, "--load", str(folder), "--ckpt-step", "4"])
    return [through.losses_and_norms[4:], resumed.losses_and_norms]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--bf16"]])
def test_a_run_goes_on_from_its_middle_bit_for_bit(tmp_path, flags):
    for through, resumed in on_ranks(_resumed, 4, tmp_path, flags, timeout_s=300):
        assert resumed == through and len(resumed) == 4


def _validated(line: list[str], is_doubted: bool) -> tuple[list, int]:
    """Losses and norms where Megatron may doubt a result, and the number of forwards."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    sums, forward = [], _forward_step

    def validated(data_iterator: Iterator, model: torch.nn.Module) -> tuple:
        output, loss = forward(data_iterator, model)
        get_rerun_state_machine().validate_result(
            output.sum().detach(),
            rejection_func=lambda result: is_doubted and len(sums) == 15,
            message="doubted",
            tolerance=0.0,
            fatal=False,
        )
        sums.append(output.sum().item())
        return output, loss

    with mock.patch.dict(globals(), _forward_step=validated):
        return run(line).losses_and_norms, len(sums)


@pytest.mark.slow
def test_a_step_that_megatron_reruns_gets_the_same_sub_samples_again():
    line = [*BASE, *HYBRID, "--train-iters", "4", *size_flags((2, 2, 4))]
    line += ["--rerun-mode", "validate_results"]
    plain = on_ranks(_validated, 4, line, False)
    for (steps, number), (again, more) in zip(
        plain, on_ranks(_validated, 4, line, True), strict=True
    ):
        assert again == steps and more > number
