# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Clips scores (--qk-clip) on shards, without a gather: a rank scales the rows that it holds."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError

_Clip = Callable[[torch.Tensor], torch.Tensor]
"""Scales the rows of a whole weight by the qk_clip_balancing_eta of its attention."""


def refuse_unknown_attention(chunks: Sequence[nn.Module]) -> None:
    """Raise ConfigurationError if an attention does not say which rows a clip scales."""
    for attention in _attentions(chunks):
        _weights_of(attention)


def _attentions(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        model: Any = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        for layer in model.decoder.layers:
            if hasattr(attention := getattr(layer, "self_attention", None), "clip_qk"):
                yield attention


@torch.no_grad()
def clip_scores(
    chunks: Sequence[nn.Module], runtimes: Sequence[HZPRuntime], log_max_only: bool
) -> float:
    """Clip between two steps, as megatron.core.optimizer.qk_clip does. Collective over the world.

    Returns the largest score of this rank's heads since the last call, over the ranks with these
    heads. log_max_only scales no rows, neither of main parameters nor of model parameters.
    """
    largest = 0.0
    clipped: list[tuple[nn.Parameter, _Clip, Any, torch.Tensor]] = []
    for attention, scores in _largest_scores(chunks, runtimes[0].units[0].device):
        largest = max(largest, (highest := scores.max()).item())
        if not log_max_only and highest > attention.config.qk_clip_threshold:
            clipped += [(*weight, attention, scores) for weight in _weights_of(attention)]
    if not log_max_only:
        _scale_rows(clipped, runtimes)
    return largest


def _largest_scores(
    chunks: Sequence[nn.Module], device: torch.device
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each attention with its heads' largest scores (fp32) over all ranks. Collective."""
    # A rank without a micro-batch takes part without scores: the others wait for it, and it holds a
    # part of the rows that they clip.
    attentions = list(_attentions(chunks))
    if not attentions:
        return
    of_layers: list[torch.Tensor] = []
    for attention in attentions:
        core = attention.core_attention
        scores, core.current_max_attn_logits = core.current_max_attn_logits, None
        if scores is None:
            heads = attention.num_attention_heads_per_partition
            scores = torch.full((heads,), -torch.inf, device=device)
        of_layers.append(scores.float())
    together = torch.cat(of_layers)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(together, dist.ReduceOp.MAX, group)
    yield from zip(attentions, together.split([len(scores) for scores in of_layers]), strict=True)


def _scale_rows(
    clipped: Sequence[tuple[nn.Parameter, _Clip, Any, torch.Tensor]], runtimes: Sequence[HZPRuntime]
) -> None:
    # Ranks with other heads share experts' units: if one rank waits for its units, all must.
    is_due = torch.tensor(float(bool(clipped)), device=runtimes[0].units[0].device)
    dist.all_reduce(is_due, dist.ReduceOp.MAX)
    if not is_due:
        return
    for runtime in runtimes:
        runtime.settle()
    units = [unit for runtime in runtimes for unit in runtime.units]
    place_of = {param: (unit, at) for unit in units for at, param in enumerate(unit.params)}
    for weight, clip, attention, scores in clipped:
        unit, index = place_of[weight]
        rows, columns = unit.layout.slices[index].shape
        _scale(unit, index, columns, _factors(clip, attention, scores, rows))
    for runtime in runtimes:
        runtime.gathers.note_written()


def _weights_of(attention: Any) -> list[tuple[nn.Parameter, _Clip]]:
    if hasattr(attention, "_clip_linear_qkv"):
        return [(attention.linear_qkv.weight, attention._clip_linear_qkv)]
    if not hasattr(attention, "_clip_q_proj_weight"):
        raise ConfigurationError(f"--qk-clip: {type(attention).__name__} does not say what to clip")
    queries = "linear_q_proj" if attention.config.q_lora_rank is None else "linear_q_up_proj"
    return [
        (getattr(attention, queries).weight, attention._clip_q_proj_weight),
        (attention.linear_kv_up_proj.weight, attention._clip_kv_proj_weight),
    ]


def _factors(clip: _Clip, attention: Any, scores: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the factor of each row, 1-D, fp32. Heads that share keys have one score."""
    shares = hasattr(attention, "_clip_linear_qkv")
    groups = attention.num_query_groups_per_partition if shares else len(scores)
    limit = attention.config.qk_clip_threshold / scores.view(groups, -1).amax(1)
    attention.qk_clip_balancing_eta = limit.clamp(max=1.0).view(-1, 1, 1)
    return clip(torch.ones(rows, 1, device=scores.device)).flatten()


def _scale(unit: HZPUnit, index: int, columns: int, factors: torch.Tensor) -> None:
    """Scale this rank's part of parameter `index`, in the main and in the model's dtype."""
    has_main = unit.is_trained and not unit.is_main_param_aliased
    for buffer in [unit.model_param, *([unit.main_param] if has_main else [])]:
        held, values = buffer.elements_of(index)
        first, last = held.start // columns, -(-held.stop // columns)
        of_rows = factors[first:last].repeat_interleave(columns)
        start = held.start - first * columns
        values.mul_(of_rows[start : start + held.numel].to(values.device))
    unit.marks.note_rewritten()
