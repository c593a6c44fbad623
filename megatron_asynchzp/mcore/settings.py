# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what the flags of a run resolve to, as the model, its communicators and its communication
need it.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from megatron_asynchzp.mcore.flags.asynchzp import (
    TraceRequest,
    resolve_grad_dtype,
    resolve_schedule,
    resolve_trace,
)
from megatron_asynchzp.mcore.flags.shard_sizes import resolve_shard_sizes, sharding_ranks_per_node
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.topology import ShardSizes

_LIBRARY_WAITS_LONGER = timedelta(minutes=1)


@dataclass(frozen=True)
class Settings:
    """sizes: of the dense sharding group. Experts use their gcd with the size of the expert
        data-parallel group.
    schedule: see ScheduleConfig.
    grad_dtype: in which gradients travel.
    timeout: of the engine's communicators, None for torch's own.
    starts_differ: the ranks initialise their parameters differently, and the first rank's are used.
    saves_beside_training: whether a checkpoint may be written while training goes on.
    trace: what this rank traces, None for nothing.
    number_of_step: see Communication.
    """

    sizes: ShardSizes
    schedule: ScheduleConfig = ScheduleConfig()
    grad_dtype: torch.dtype = torch.float32
    timeout: timedelta | None = None
    starts_differ: bool = False
    saves_beside_training: bool = False
    trace: TraceRequest | None = None
    number_of_step: Callable[[], int | None] = lambda: None

    @classmethod
    def of(cls, args: Namespace, group_size: int) -> "Settings":
        """args: validated.
        group_size: ranks of the dense sharding group.
        """
        return cls(
            resolve_shard_sizes(args, group_size, sharding_ranks_per_node(args)),
            resolve_schedule(args),
            resolve_grad_dtype(args),
            _timeout(args),
            args.data_parallel_random_init,
            args.async_save,
            resolve_trace(args),
            partial(_number_of_step, args),
        )


def _number_of_step(args: Namespace) -> int | None:
    """Megatron counts the steps that are done, and only its training loop does."""
    done = getattr(args, "curr_iteration", None)
    return None if done is None else done + 1


def _timeout(args: Namespace) -> timedelta:
    """A device's library ends the process and names no unit, so the engine's own limit comes
    before it. On a CPU it is gloo that ends a wait."""
    limit = timedelta(minutes=args.distributed_timeout_minutes)
    is_on_cpu = torch.accelerator.current_accelerator() is None
    return limit if is_on_cpu else limit + _LIBRARY_WAITS_LONGER
