# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The `--asynchzp-*` flags, and the schedule and the trace that they ask for. Importing this file
loads no torch: a wrong flag is refused before anything heavy is imported.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_asynchzp.errors import ConfigurationError, no_file_at
from megatron_asynchzp.schedule import (
    AUTO,
    DEFAULT_GRAD_SLOT_NBYTES,
    EARLY_UPDATES,
    SCHEDULES,
    ScheduleConfig,
)

if TYPE_CHECKING:
    import torch

ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Projections of a layer that may have an adapter, as the planner knows them."""
EARLY_UPDATE_FLAG = "--asynchzp-early-update"
NODE, WORLD = "node", "world"
"""Shard sizes as a rule, which any number of nodes has a number for."""
_MIB = 2**20

# Late enough for the order of units to be known and for allocations to be over.
_TRACED_STEP = 10


@dataclass(frozen=True)
class TraceRequest:
    """A step of a run to be written to `path`. num_steps: of the run and of those that it goes on
    from; None: unknown."""

    path: Path
    num_steps: int | None = None

    def step_after(self, first: int) -> int:
        """Which step to write of a run that begins with the step `first`: its tenth. In a shorter
        one it is the last but one, for what comes after a step ends its trace, and after the last
        one that may be an evaluation."""
        if self.num_steps is None:
            return first + _TRACED_STEP - 1
        return max(first, min(first + _TRACED_STEP, self.num_steps) - 1)


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
        help="Which thread issues the collectives: the one that computes, ahead of their use "
        "(main-thread) or when they are needed (inline), or on a CPU background threads "
        "(threaded). Default: threaded on a CPU, else main-thread (auto).",
    )
    group.add_argument(
        "--asynchzp-prefetch-depth",
        type=_at_least_0,
        default=1,
        metavar="UNITS",
        help="Units of each size that are gathered ahead of the one that computes. Default: 1.",
    )
    group.add_argument(
        "--asynchzp-memory-in-flight-gb",
        type=float,
        default=None,
        metavar="GIB",
        help="Upper bound on a rank's memory for gathered parameters and for gradients that are "
        "being reduced, shared equally by its model chunks. A lower bound makes gathers start "
        "later. Default: what two layers of each size need (in the start table).",
    )
    group.add_argument(
        "--asynchzp-grad-slot-mb",
        type=float,
        default=DEFAULT_GRAD_SLOT_NBYTES / _MIB,
        metavar="MIB",
        help="The largest piece of a unit's fp32 gradients that one collective reduces; with "
        "gradient accumulation fusion a unit is always one piece. Default: "
        f"{DEFAULT_GRAD_SLOT_NBYTES // _MIB}.",
    )
    for what, saved, kind, rest in (
        ("params", "parameters that stay gathered", _GIB_OR_AUTO, " auto: what is free."),
        ("grads", "gradients that stay unreduced", float, ""),
    ):
        group.add_argument(
            f"--asynchzp-keep-{what}-gb",
            type=kind,
            default=0.0,
            metavar="GIB",
            help=f"Memory budget of a rank, beside what is in flight, for {saved} from one "
            f"micro-batch to a later one, with pipelines and gradient accumulation.{rest} "
            "Default: 0.",
        )
    group.add_argument(
        EARLY_UPDATE_FLAG,
        choices=EARLY_UPDATES,
        default=AUTO,
        help="Send updated parameters while backward goes on, before the norm of the gradients is "
        "known; a step that is clipped or skipped sends them again. The results are the same. "
        "auto: as many as backward has room for, while steps are not clipped; on: all; off: none. "
        "Default: auto.",
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
        help="Write a Chrome trace of one step of rank 0: the tenth after its start, or the last "
        "but one. With a pipeline the first rank of each further stage N writes its own, as FILE "
        "with .stageN before the suffix. Default: no trace.",
    )
    group.add_argument(
        "--asynchzp-verify",
        choices=("full", "structure"),
        default="full",
        help="What --load reads to find damage before it loads: the CRC-32 of every record (full), "
        "or manifest, sizes and zip directories without the data (structure). Default: full.",
    )
    group.add_argument(
        "--asynchzp-save-ranks",
        type=_at_least_1,
        default=None,
        metavar="RANKS",
        help="How many of the ranks that share the optimizer states of a layer write it, at most: "
        "the others bring them theirs, and the layers take turns. Files and parts of tensors grow "
        "with it. Default: 64 over the tensor- and expert-parallel ranks of a layer.",
    )
    group.add_argument(
        "--asynchzp-save-trained-only",
        action="store_true",
        help="Save of the model only what is trained (adapters). Loading such a checkpoint takes "
        "the frozen rest from --pretrained-checkpoint. Default: save the whole model.",
    )
    _add_adapters(group)
    add_dry_run_arguments(group)
    add_device_argument(group)
    return parser


def _at_least_0(word: str) -> int:
    if not word.isdecimal():
        raise ArgumentTypeError(f"{word} is not a whole number from 0")
    return int(word)


def _at_least_1(word: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise ArgumentTypeError(f"{word} is not a whole number from 1")
    return int(word)


def _or_one_of(
    words: Sequence[str], number: type[int] | type[float], unit: str
) -> Callable[[str], float | str]:
    """Reads a number of `unit`, or one of `words`, which stand for what the run makes of them."""

    def read(word: str) -> float | str:
        if word in words:
            return word
        try:
            return number(word)
        except ValueError:
            allowed = f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]
            raise ArgumentTypeError(f"{word} is neither a number of {unit} nor {allowed}") from None

    return read


_KEPT = ("params", "grads")
_GIB_OR_AUTO = _or_one_of((AUTO,), float, "GiB")
_RANKS_OR_RULE = _or_one_of((AUTO, NODE, WORLD), int, "ranks")


def _add_shard_sizes(group) -> None:
    held = {
        "param": ("parameters", NODE),
        "grad": ("gradients", NODE),
        "optim": ("main parameters and optimizer state", WORLD),
    }
    for state, (what, default) in held.items():
        group.add_argument(
            f"--asynchzp-{state}-shard-size",
            type=_RANKS_OR_RULE,
            default=None,
            metavar="RANKS",
            help=f"Ranks (data x context parallel) that share one copy of the {what}; node: those "
            "of the sharding group on one node; world: the whole sharding group; auto: as many as "
            f"the planner finds best on --asynchzp-cluster. Default: {default}.",
        )
    group.add_argument(
        "--asynchzp-cluster",
        metavar="NAME_OR_FILE",
        default=None,
        help="The machines of the run as the planner knows them: the name of a cluster, or a file "
        "that describes one. For shard sizes that are auto; those that are not given are chosen "
        "with them. Default: none.",
    )


def _add_adapters(group) -> None:
    group.add_argument(
        "--asynchzp-adapter-rank",
        type=_at_least_1,
        default=None,
        metavar="RANK",
        help="For the planner, the dry run and shard sizes that are auto: the script freezes the "
        "model and adds low-rank adapters of this rank. A run that trains other parameters is "
        "refused. Default: all is trained.",
    )
    group.add_argument(
        "--asynchzp-adapter-layers",
        nargs="+",
        choices=ADAPTED,
        default=list(ADAPTED),
        help="Which projections of each layer have one. Default: all.",
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
        help="Memory of one device. The dry run prints what is left of it, and ends with status 1 "
        "where that is nothing. Default: not compared.",
    )


def add_device_argument(parser) -> None:
    """The one flag that is read before Megatron can be imported."""
    parser.add_argument(
        "--asynchzp-device",
        choices=("auto", "cpu"),
        default="auto",
        help="The accelerator, or the CPU platform where there is none (auto), or always the CPU "
        "(cpu). A machine with an accelerator that torch does not see is refused without cpu. "
        "Default: auto.",
    )


def resolve_schedule(args: Namespace) -> ScheduleConfig:
    """The schedule that the flags ask for; raises ConfigurationError for one that cannot be."""
    slot = _nbytes("--asynchzp-grad-slot-mb", args.asynchzp_grad_slot_mb, _MIB)
    budget = args.asynchzp_memory_in_flight_gb
    if budget is not None:
        # Megatron's validation sets it.
        chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
        budget = _nbytes("--asynchzp-memory-in-flight-gb", budget, 2**30) // chunks
    kept = {what: _kept_nbytes(what, getattr(args, f"asynchzp_keep_{what}_gb")) for what in _KEPT}
    early_update = _early_update(args)
    try:
        return ScheduleConfig(
            args.asynchzp_schedule,
            args.asynchzp_prefetch_depth,
            budget,
            slot,
            time_limit_s=60.0 * args.distributed_timeout_minutes,
            checks_order=args.asynchzp_check_order,
            timed_every=args.log_interval,
            keep_params_nbytes=kept["params"],
            keep_grads_nbytes=kept["grads"],
            keeps_params_in_free_memory=args.asynchzp_keep_params_gb == AUTO,
            early_update=early_update,
        )
    except ValueError as error:
        raise ConfigurationError(
            f"--asynchzp-prefetch-depth {args.asynchzp_prefetch_depth}: {error}"
        ) from error


def _early_update(args: Namespace) -> str:
    """--asynchzp-early-update, or off where Megatron changes all gradients after backward. Raises
    ConfigurationError for on there."""
    # Before Megatron is imported `args` has our flags alone.
    given = vars(args)
    optimizer = given.get("optimizer", "adam")
    asked, reason = args.asynchzp_early_update, None
    if given.get("calculate_per_token_loss"):
        reason = "--calculate-per-token-loss scales the gradients when backward is over"
    elif given.get("sequence_parallel") and args.tensor_model_parallel_size > 1:
        reason = (
            "with --sequence-parallel the gradients of every layer's norms are summed over the "
            "tensor-parallel ranks when backward is over"
        )
    elif given.get("qk_layernorm") and args.tensor_model_parallel_size > 1:
        reason = (
            "with --qk-layernorm the gradients of these norms are summed over the tensor-parallel "
            "ranks when backward is over"
        )
    elif "muon" in optimizer:
        reason = f"--optimizer {optimizer} needs whole matrices"
    if reason is not None and asked == "on":
        raise ConfigurationError(f"{EARLY_UPDATE_FLAG} on: {reason}; leave the flag out")
    return asked if reason is None else "off"


def _nbytes(flag: str, value: float, unit: int) -> int:
    """A size in bytes. Raises ConfigurationError for one that is none."""
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{flag} {value:g}: give a size larger than 0")
    return int(value * unit)


def _kept_nbytes(what: str, gib: float | str) -> int:
    """As _nbytes, where 0 stands for no memory, and AUTO for none before the first update."""
    if isinstance(gib, str) or not gib:
        return 0
    flag = f"--asynchzp-keep-{what}-gb"
    if not 0 <= gib < float("inf"):
        raise ConfigurationError(f"{flag} {gib:g}: give the GiB that may be used, or 0 for none")
    return _nbytes(flag, gib, 2**30)


def resolve_trace(args: Namespace) -> TraceRequest | None:
    """Return the trace that --asynchzp-trace asks of this rank; raises as refuse_trace_path."""
    if args.asynchzp_trace is None or (stage := _stage_led(args)) is None:
        return None
    refuse_trace_path(args)
    path = Path(args.asynchzp_trace)
    if stage > 0:
        path = path.with_name(f"{path.stem}.stage{stage}{path.suffix}")
    return TraceRequest(path, args.train_iters)


def refuse_trace_path(args: Namespace) -> None:
    """Raise ConfigurationError for what cannot be a file, now rather than when the step has run."""
    path = args.asynchzp_trace
    if path is not None and (fault := no_file_at(Path(path))):
        raise ConfigurationError(f"--asynchzp-trace {path}: {fault}")


def _stage_led(args: Namespace) -> int | None:
    """The pipeline stage whose first rank this is; None for every other rank."""
    stages = args.pipeline_model_parallel_size
    ranks = args.world_size // stages
    if args.use_tp_pp_dp_mapping:
        ranks = args.tensor_model_parallel_size * args.context_parallel_size
    stage, place = divmod(args.rank, ranks)
    return stage if place == 0 and stage < stages else None


def resolve_grad_dtype(args: Namespace) -> "torch.dtype":
    """In which dtype gradients travel. As in stock Megatron, --grad-reduce-in-bf16 is for bf16
    models, and main gradients in bf16 travel as they are."""
    import torch

    is_shorter = args.grad_reduce_in_bf16 or resolve_main_grad_dtype(args) != torch.float32
    return torch.bfloat16 if args.bf16 and is_shorter else torch.float32


def resolve_main_grad_dtype(args: Namespace) -> "torch.dtype":
    """In which dtype a rank keeps the sums of its gradients."""
    import torch

    word = getattr(args, "asynchzp_main_grads_dtype", "fp32")
    return torch.bfloat16 if word == "bf16" else torch.float32
