# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes `--asynchzp-*` flags of AsyncHZPConfig, and a config of parsed flags. Loads no torch."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.config import OPTIONS, AsyncHZPConfig, default_of, flag_of
from megatron_asynchzp.mcore.flags.shard_sizes import node_size
from megatron_asynchzp.planner.cluster_files import load_cluster


class DryRunStop(ConfigurationError):
    """Raised with Megatron's `validated` arguments when nothing is to run."""

    def __init__(self, args: Namespace):
        super().__init__(
            "--asynchzp-dry-run starts no ranks: python -m megatron_asynchzp.launch SCRIPT [flags] "
            "--asynchzp-dry-run"
        )
        self.validated = args


def add_asynchzp_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of this plugin to Megatron's parser, as an `extra_args_provider` would."""
    group = parser.add_argument_group(title="asynchzp")
    group.add_argument(
        "--use-asynchzp",
        action="store_true",
        help="Train with hierarchical ZeRO in place of DDP and Megatron's optimizer.",
    )
    for name in OPTIONS:
        add_argument_of(group, name)
    add_dry_run_arguments(group)
    return parser


def add_argument_of(parser: Any, name: str) -> None:
    made = OPTIONS[name]
    told, default = made.metadata, default_of(name)
    words: dict[str, Any] = {"dest": f"asynchzp_{name}", "help": told["text"]}
    if isinstance(default, bool):
        words["action"] = "store_false" if default else "store_true"
    else:
        words |= {"default": default, "type": told["read"] and _for_argparse(told["read"])}
        words |= {"choices": told["choices"] or None, "metavar": told["metavar"]}
        if told["is_list"]:
            words |= {"nargs": "+", "default": list(default)}
    parser.add_argument(flag_of(name), **words)


@cache
def _for_argparse(read: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Let the message of a ValueError reach the user; argparse has its own for int and float."""
    if isinstance(read, type):
        return read

    def read_word(word: str) -> Any:
        try:
            return read(word)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return read_word


def config_of(args: Namespace) -> AsyncHZPConfig:
    """Return the config that the flags ask for. Raises ConfigurationError, one line."""
    return AsyncHZPConfig.of(vars(args))


def schedule_of(args: Any, config: AsyncHZPConfig | None = None) -> ScheduleConfig:
    """Return the engine's schedule by Megatron's settings and a config, by default theirs."""
    # Megatron's validation sets it.
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    limit_s, config = 60.0 * args.distributed_timeout_minutes, config or config_of(args)
    schedule = config.schedule_config(chunks, limit_s, args.log_interval)
    if (has_windows := getattr(args, "asynchzp_registers_windows", None)) is None:
        return schedule
    domain = load_cluster(config.cluster).ranks_per_domain if config.cluster else node_size(args)
    return replace(schedule, registers_memory=domain, registers_windows=has_windows)


def add_dry_run_arguments(parser: Any) -> None:
    """Add the flags that the launcher reads before anything is started."""
    parser.add_argument(
        "--asynchzp-dry-run",
        nargs="?",
        type=int,
        const=0,
        default=None,
        metavar="RANKS",
        help="Start nothing: print the groups of so many ranks, and the memory of each by pipeline "
        "stage. Only through megatron_asynchzp.launch; without RANKS: WORLD_SIZE of the "
        "environment, else the fewest ranks that the parallel sizes and the batch allow. "
        "Default: train.",
    )
    parser.add_argument(
        "--asynchzp-device-gb",
        type=float,
        default=None,
        metavar="GIB",
        help="Memory of one device. The dry run prints what is left of it, and ends with status 1 "
        "where that is nothing. Default: not compared.",
    )
