# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which units of a Megatron run are sent before the update, and why others are not."""

from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.data_parallel import AsyncHZPDataParallel
from megatron_asynchzp.mcore.flags.asynchzp import EARLY_UPDATE_FLAG
from megatron_asynchzp.zero.early_update import EarlyUpdate, is_elementwise
from megatron_asynchzp.zero.unit import HZPUnit

# Attributes of parameters whose gradients finalize_model_grads changes after their reduction.
_SUMMED_OVER_TP = ("sequence_parallel", "average_gradients_across_tp_domain")
_SUMMED_OVER_PP = ("is_embedding_or_output_parameter", "shared_embedding", "pipeline_parallel")
_QK_NORMS = ("q_layernorm", "k_layernorm")


def build_early_update(
    chunks: Sequence[AsyncHZPDataParallel],
    optimizers: Sequence[torch.optim.Optimizer],
    params_of: dict[HZPUnit, list[torch.nn.Parameter]],
    inverse_scale: Callable[[], torch.Tensor | None],
) -> EarlyUpdate | None:
    """What --asynchzp-early-update asks for, None for nothing.

    optimizers, inverse_scale: of the run; params_of: of each trained unit, as in EarlyUpdate.

    Raises ConfigurationError, one line, where it is on and no unit can be sent.
    """
    schedule, config = chunks[0].communication.schedule, chunks[0].config
    if not schedule.may_send_early:
        return None
    kinds = ", ".join(type(one).__name__ for one in optimizers)
    reason = None
    if config.calculate_per_token_loss:  # set without the flag
        reason = "the loss per token scales the gradients when backward is over"
    elif len(optimizers) > 1 or not is_elementwise(optimizers[0]):
        reason = f"{kinds} is not known to update each element from that element alone"
    early = {
        unit: params
        for chunk in chunks
        for unit in chunk.units
        if (params := params_of.get(unit)) is not None and not any(_changed_later(chunk, unit))
    }
    if reason is None and not early:
        reason = "Megatron changes gradients of every unit when backward is over"
    if reason is None:
        return EarlyUpdate(optimizers[0], early, schedule.early_update == "on", inverse_scale)
    if schedule.early_update == "on":
        raise ConfigurationError(f"{EARLY_UPDATE_FLAG} on: {reason}; leave the flag out")
    return None


def _changed_later(chunk: AsyncHZPDataParallel, unit: HZPUnit) -> Iterator[bool]:
    """For each parameter whether Megatron changes its gradient after the engine's reduction."""
    config: TransformerConfig = chunk.config
    summed: tuple[str, ...] = ()
    if chunk.tp_group.size() > 1:
        summed += _SUMMED_OVER_TP
    if chunk.pp_group.size() > 1:
        summed += _SUMMED_OVER_PP
    norms = _QK_NORMS if chunk.tp_group.size() > 1 and config.qk_layernorm else ()
    for name, param in zip(unit.param_names, unit.params, strict=True):
        yield any(getattr(param, mark, False) for mark in summed)
        yield any(norm in name for norm in norms)
