# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The `--asynchzp-*` flags, and the schedule and the trace that they ask for."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.zero.config import AUTO, SCHEDULES, ScheduleConfig

# Late enough for the order of units to be known and for allocations to be over.
_TRACED_STEP = 10


@dataclass(frozen=True)
class TraceRequest:
    """Which step, counted from 1, to write where."""

    path: Path
    step: int


class DryRunStop(ConfigurationError):
    """Megatron's arguments are validated, and nothing is to run. validated: those arguments.

    Its message is for a process that did not start as a dry run."""

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
    _add_shard_sizes(group)
    group.add_argument(
        "--asynchzp-schedule",
        choices=(AUTO, *SCHEDULES),
        default=AUTO,
        help="Who issues the collectives: background threads (threaded), the thread that computes "
        "ahead of their use (main-thread), or the same when they are needed (inline). Default: "
        "main-thread on CUDA, threaded elsewhere (auto).",
    )
    group.add_argument(
        "--asynchzp-prefetch-depth",
        type=int,
        default=1,
        metavar="UNITS",
        help="Units of each size that are gathered ahead of the one that computes. Default: 1.",
    )
    group.add_argument(
        "--no-asynchzp-check-order",
        action="store_false",
        dest="asynchzp_check_order",
        help="Do not compare, once per step, which collectives the ranks issued in which order. "
        "Default: compare.",
    )
    group.add_argument(
        "--asynchzp-trace",
        metavar="FILE",
        default=None,
        help="Write a Chrome trace of one step of rank 0: the tenth, or the last but one. With a "
        "pipeline the first rank of each further stage N writes its own, as FILE with .stageN "
        "before the suffix. Default: no trace.",
    )
    group.add_argument(
        "--asynchzp-verify",
        choices=("full", "structure"),
        default="full",
        help="What --load reads to find damage before it loads: the CRC-32 of every record (full), "
        "or manifest, sizes and zip directories without the data (structure). Default: full.",
    )
    add_dry_run_arguments(group)
    add_device_argument(group)
    return parser


def _add_shard_sizes(group) -> None:
    node = "the ranks of the sharding group on one node"
    held = {
        "param": ("parameters", node),
        "grad": ("gradients", node),
        "optim": ("main parameters and optimizer state", "the whole sharding group"),
    }
    for state, (what, default) in held.items():
        group.add_argument(
            f"--asynchzp-{state}-shard-size",
            type=int,
            default=None,
            metavar="RANKS",
            help=f"Ranks (data x context parallel) that share one copy of the {what}. "
            f"Default: {default}.",
        )


def add_dry_run_arguments(parser) -> None:
    """The flags that the launcher reads before anything is started."""
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
        help="Memory of one device, of which the dry run tells what is left; it ends with status 1 "
        "where nothing is. Default: not compared.",
    )


def add_device_argument(parser) -> None:
    """The one flag that is read before Megatron can be imported."""
    parser.add_argument(
        "--asynchzp-device",
        choices=("auto", "cpu"),
        default="auto",
        help="The accelerator, or the CPU platform where there is none (auto), or always the CPU "
        "(cpu). Default: auto.",
    )


def resolve_schedule(args: Namespace) -> ScheduleConfig:
    """The schedule that the flags ask for; raises ConfigurationError for one that cannot be."""
    try:
        return ScheduleConfig(
            args.asynchzp_schedule,
            args.asynchzp_prefetch_depth,
            time_limit_s=60.0 * args.distributed_timeout_minutes,
            checks_order=args.asynchzp_check_order,
            timed_every=args.log_interval,
        )
    except ValueError as error:
        raise ConfigurationError(
            f"--asynchzp-prefetch-depth {args.asynchzp_prefetch_depth}: {error}"
        ) from error


def resolve_trace(args: Namespace) -> TraceRequest | None:
    """What --asynchzp-trace asks of this rank. Raises ConfigurationError for a folder that does not
    exist, now rather than when the step has run."""
    if args.asynchzp_trace is None or (stage := _stage_led(args)) is None:
        return None
    path = Path(args.asynchzp_trace)
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigurationError(
            f"--asynchzp-trace {path}: no such folder; name a file in a folder that exists"
        )
    # Not the last: what comes after it, and ends the trace, may be an evaluation.
    num_steps = args.train_iters or _TRACED_STEP + 1
    if stage > 0:
        path = path.with_name(f"{path.stem}.stage{stage}{path.suffix}")
    return TraceRequest(path, max(1, min(_TRACED_STEP, num_steps - 1)))


def _stage_led(args: Namespace) -> int | None:
    """The pipeline stage whose first rank this is; None for every other rank."""
    stages = args.pipeline_model_parallel_size
    ranks = args.world_size // stages
    if args.use_tp_pp_dp_mapping:
        ranks = args.tensor_model_parallel_size * args.context_parallel_size
    stage, place = divmod(args.rank, ranks)
    return stage if place == 0 and stage < stages else None


def resolve_grad_dtype(args: Namespace) -> torch.dtype:
    """In which dtype gradients travel. As in stock Megatron, --grad-reduce-in-bf16 is for bf16
    models."""
    return torch.bfloat16 if args.bf16 and args.grad_reduce_in_bf16 else torch.float32
