# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what the flags of a run resolve to, as the model, its communicators and its communication
need it, and the check that all ranks have the same.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from megatron_asynchzp.comm.agreement import PATH, refuse_differences, settings_of_process, text_of
from megatron_asynchzp.mcore.flags.asynchzp import (
    TraceRequest,
    resolve_grad_dtype,
    resolve_main_grad_dtype,
    resolve_schedule,
    resolve_trace,
)
from megatron_asynchzp.mcore.flags.shard_sizes import resolve_shard_sizes, sharding_ranks_per_node
from megatron_asynchzp.mcore.patch import found_version
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.topology import ShardSizes

_LIBRARY_WAITS_LONGER = timedelta(minutes=1)
# Arguments that may differ between ranks or nodes: who they are, and what they only report.
_OF_ONE_RANK = re.compile(
    r"rank|tensorboard_dir|config_logger_dir|data_cache_path"
    r"|(wandb|one_logger|profile|pytorch_profiler|flight_recorder|record|memory_snapshot)(_.*)?"
    r"|(.*_)?(host|hostname|addr|address|ip|port|name|tag|url|local_rank|node_rank|logging_level)"
)
_FILES = re.compile(r"(.*_)?(load|save|dir|path|file|folder|prefix|tokenizer_model)")


@dataclass(frozen=True)
class Settings:
    """sizes: of the dense sharding group. Experts use their gcd with the size of the expert
        data-parallel group.
    schedule: see ScheduleConfig.
    grad_dtype, main_grad_dtype: see ShardGroups.
    timeout: of the engine's communicators, None for torch's own.
    starts_differ: the ranks initialise their parameters differently, and the first rank's are used.
    saves_beside_training: whether a checkpoint may be written while training goes on.
    sends_codes: whether weights of layers that compute in FP8 are gathered in FP8.
    trace: what this rank traces, None for nothing.
    number_of_step: see Communication.
    """

    sizes: ShardSizes
    schedule: ScheduleConfig = ScheduleConfig()
    grad_dtype: torch.dtype = torch.float32
    main_grad_dtype: torch.dtype = torch.float32
    timeout: timedelta | None = None
    starts_differ: bool = False
    saves_beside_training: bool = False
    sends_codes: bool = False
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
            resolve_main_grad_dtype(args),
            _timeout(args),
            args.data_parallel_random_init,
            args.async_save,
            getattr(args, "asynchzp_sends_codes", False),
            resolve_trace(args),
            partial(_number_of_step, args),
        )


def refuse_other_flags(args: Namespace) -> None:
    """Raise ConfigurationError, on every rank, where the ranks were not started with the same
    flags, versions and environment, up to who a rank is, where files lie and what is reported.
    Collective over the world. args: validated.
    """
    flags = {
        name: _without_files(value) if _FILES.fullmatch(name) else text_of(value)
        for name, value in vars(args).items()
        if not _OF_ONE_RANK.fullmatch(name)
    }
    process = settings_of_process() | {"the version of megatron-core": found_version()}
    refuse_differences(
        flags | process,
        None,
        torch.accelerator.current_accelerator() or torch.device("cpu"),
        "start every rank with the same flags, versions and environment",
        _spelt,
    )


def _spelt(name: str) -> str:
    """The flag that sets the argument `name`."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser(add_help=False))
    options = (one.option_strings for one in parser._actions if one.dest == name)  # pyright: ignore[reportPrivateUsage]
    return next((option[0] for option in options if option), name)


def _without_files(value: object) -> str:
    """Whether there are any, and the weights among them."""
    if isinstance(value, (list, tuple)):
        return text_of([one if _is_number(one) else PATH for one in value])
    return PATH if isinstance(value, str) else text_of(value)


def _is_number(word: object) -> bool:
    return re.fullmatch(r"[\d.eE+-]+", str(word)) is not None


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
