# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces how Megatron runs the sub-samples of a global batch (--hybrid-context-parallel)."""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from inspect import signature
from itertools import chain, count
from typing import Any

from megatron_asynchzp.mcore.patches.patch import replaces
from megatron_asynchzp.mcore.run.settings import Run, run_args
from megatron_asynchzp.planner.sub_samples import Routes, evened

_BY_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")
_PACKED = "packed_sample"  # its number, at each token
_ALONE = Namespace(size=lambda: 1, rank=lambda: 0)  # the process group of a rank by itself


@replaces(
    "megatron.training.training.HybridCPDataLoaderWrapper",
    "data_iterator config pg_collection",
    why="Megatron's rerun mode, on by default, takes no iterator but its own",
    drop_when="Megatron wraps it, or runs sub-samples in its standard schedules (from 0.20 on)",
)
def route_samples(original: Callable, data_iterator: Any, *args: Any, **options: Any) -> Any:
    if run_args() is None:
        return original(data_iterator, *args, **options)
    from megatron.core.rerun_state_machine import RerunDataIterator

    class Routed(RerunDataIterator):
        is_routed = True

        def __iter__(self) -> "Routed":
            return self

    # The inner one would keep every batch: the rerun mode tells the outer one alone of new steps.
    inner = getattr(data_iterator, "iterable", data_iterator)
    return Routed(original(inner, *args, **options))


@replaces(
    "megatron.core.pipeline_parallel.hybrid_cp_schedule.hybrid_context_parallel_forward_backward",
    "forward_step_func data_iterator model num_microbatches input_tensor output_tensor_grad "
    "forward_data_store config collect_non_loss_data first_val_step forward_only no_sync_func "
    "total_num_tokens check_first_val_step model_type",
    why="ranks that gather or reduce together need equally many sub-samples, so fillers of one "
    "token without a loss follow; Megatron routes the samples of training alone, not those of "
    "evaluation",
    drop_when="Megatron gives ranks equally many, and evaluates",
)
def run_samples(original: Callable, *args: Any, **options: Any) -> tuple:
    if (run := run_args()) is None:
        return original(*args, **options)
    from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper

    given = signature(original).bind(*args, **options).arguments
    packed: list[int] = []  # by report: the number of the packed sample
    routed = given["data_iterator"]
    by_packed = run.sft and given["forward_only"] and not given["collect_non_loss_data"]
    if not hasattr(routed, "is_routed"):
        read = _numbered(routed) if by_packed else routed
        routed = HybridCPDataLoaderWrapper(read, given["config"])
    given["data_iterator"] = _with_fillers(routed, run, packed)
    reports, num_tokens = original(**given)
    if by_packed and all(v.numel() == 2 for report in reports for v in report.values()):
        reports = _summed(reports, packed, given["num_microbatches"])
    return reports, num_tokens


def _numbered(data_iterator: Any) -> Iterator[list[dict]]:
    """Yield a step's packed samples, numbered; their sub-samples keep the number."""
    from megatron.core import parallel_state as state

    numbers = count(state.get_data_parallel_rank(), state.get_data_parallel_world_size())
    read = zip(next(data_iterator), numbers, strict=False)
    yield [sample | {_PACKED: sample["tokens"] * 0 + number} for sample, number in read]


def _summed(reports: list[dict], packed: list[int], num_own: int) -> list[dict]:
    """Sum reports by packed sample: evaluation with --sft averages their means."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    sums: dict[str, Any] = {}
    for name, first in reports[0].items():
        totals = first.new_zeros(num_own * state.get_data_parallel_world_size(), 3)
        for number, report in zip(packed, reports, strict=False):
            totals[number, :2] += report[name].view(2)
            totals[number, 2] += 1
        dist.all_reduce(totals, group=state.get_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(totals, group=state.get_tensor_model_parallel_group())
        sums[name] = totals[totals[:, 2] > 0, :2]
    return [dict(zip(sums, row, strict=True)) for row in zip(*sums.values(), strict=True)]


def _with_fillers(routed: Any, run: Any, packed: list[int]) -> Iterator[tuple[dict, Routes]]:
    """Yield copies of a step's sub-samples, for a rerun gets them again, and fillers."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    settings = Run.current_settings()
    assert settings is not None
    block = max(settings.sizes.param, settings.sizes.grad)
    if run.num_experts:  # the ranks that send each other tokens as well
        block = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    samples, routes = next(routed)
    filled = evened(routes, block)
    num_ranks = Counter(chain.from_iterable(chain.from_iterable(filled)))
    filler = {name: values[:1] for name, values in next(iter(samples.values())).items()}
    filler["loss_mask"] = filler["loss_mask"] * 0
    split = run.tensor_model_parallel_size if run.sequence_parallel else 1
    given = {}
    for number in chain.from_iterable(group[rank] for group in filled):
        parts = 2 * num_ranks[number] if num_ranks[number] > 1 else 1
        given[number] = _padded(samples.get(number, filler), split * parts)
        if _PACKED in given[number]:
            packed.append(int(given[number].pop(_PACKED)[0]))
    yield given, filled


def _padded(sample: Mapping[str, Any], multiple: int) -> dict[str, Any]:
    """Repeat the last token without a loss, because Megatron cuts a sub-sample into equal parts."""
    import torch

    rest = -len(sample["tokens"]) % multiple
    longer = {name: torch.cat([v, v[-1:].expand(rest)]) for name, v in sample.items()}
    longer["loss_mask"][len(sample["tokens"]) :] = 0
    return longer


@replaces(
    "megatron.core.utils.get_batch_on_this_tp_rank",
    "batch is_sft[-0.18] has_cu_seqlens[0.19] is_hybrid_cp create_attention_mask_in_dataloader "
    "broadcast_src_rank broadcast_group cp_size tp_rank micro_batch_size seq_length "
    "mtp_on_this_rank pipeline_model_parallel_size is_pipeline_first_stage is_pipeline_last_stage",
    why="Megatron's own scripts want sub-samples in a batch of one, with the ends of their "
    "sequences, and get neither",
    drop_when="HybridCPDataLoaderWrapper gives them both",
)
def shape_sample(original: Callable, batch: dict, *args: Any, **options: Any) -> Any:
    tokens = batch.get("tokens")
    if run_args() is not None and options.get("is_hybrid_cp") and tokens is not None:
        import torch

        ends = torch.tensor([[0, len(tokens)]], dtype=torch.int32, device=tokens.device)
        batched = {name: batch[name][None] for name in _BY_TOKEN if batch.get(name) is not None}
        batch = {**batch, **batched, "cu_seqlens": ends, "max_seqlen": ends[0, 1:].clone()}
    return original(batch, *args, **options)


@replaces(
    "megatron.core.transformer.attention.Attention.forward",
    "self hidden_states attention_mask key_value_states inference_context rotary_pos_emb "
    "rotary_pos_cos rotary_pos_sin rotary_pos_cos_sin attention_bias packed_seq_params "
    "sequence_len_offset inference_params",
    why="rotary positions follow the ranks of a sub-sample, where Megatron takes those of "
    "--context-parallel-size",
    drop_when="apply_rotary_pos_emb gets packed_seq_params.cp_group",
)
def attend(original: Callable, self: Any, *args: Any, **options: Any) -> Any:
    packed = options.get("packed_seq_params")
    if getattr(packed, "local_cp_size", None) is None or run_args() is None:
        return original(self, *args, **options)
    groups = self.pg_collection
    self.pg_collection = copy(groups)
    self.pg_collection.cp = packed.cp_group or _ALONE
    try:
        return original(self, *args, **options)
    finally:
        self.pg_collection = groups
