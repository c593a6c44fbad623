# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which units of a Megatron run are sent before the update, and why others are not."""

from collections.abc import Callable, Sequence

import torch

from megatron_asynchzp.engine.zero.early_update import EarlyUpdate, is_elementwise
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.config import flag_of
from megatron_asynchzp.mcore.start.units import has_late_grads
from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel


def build_early_update(
    chunks: Sequence[AsyncHZPDataParallel],
    optimizers: Sequence[torch.optim.Optimizer],
    params_of: dict[HZPUnit, list[torch.nn.Parameter]],
    inverse_scale: Callable[[], torch.Tensor | None],
) -> EarlyUpdate | None:
    """Build what --asynchzp-early-update asks for, or None; refuse "on" if no unit can be sent."""
    schedule, config = chunks[0].communication.schedule, chunks[0].config
    if not schedule.may_send_early:
        return None
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    reason = None
    if config.calculate_per_token_loss:  # set without the flag
        reason = "the loss per token scales the gradients when backward is over"
    elif len(optimizers) > 1 or not is_elementwise(optimizers[0]):
        reason = f"{kinds} is not known to update each element from that element alone"
    early = {
        unit: params
        for chunk in chunks
        for unit in chunk.units
        if (params := params_of.get(unit)) is not None
        and not unit.is_on_host
        and not has_late_grads(
            unit, chunk.tp_group.size(), chunk.pp_group.size(), chunk.config.qk_layernorm
        )
    }
    if reason is None and not early:
        reason = (
            "Megatron changes gradients of every unit when backward is over, or its optimizer "
            "states are on the host (--optimizer-cpu-offload)"
        )
    if reason is None:
        is_forced = schedule.early_update == "on"
        return EarlyUpdate(optimizers[0], early, is_forced, inverse_scale=inverse_scale)
    if schedule.early_update == "on":
        raise ConfigurationError(f"{flag_of('early_update')} on: {reason}; leave the flag out")
    return None
