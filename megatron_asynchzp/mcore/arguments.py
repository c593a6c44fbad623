# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the `--asynchzp-*` flags: their defaults, what follows from them, and which Megatron
arguments they switch off. Must not know the engine, nor that it is called from a patch.
"""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from math import gcd
from pathlib import Path

from megatron_asynchzp.mcore.communication import TraceRequest
from megatron_asynchzp.mcore.unsupported import ConfigurationError, refuse_unsupported
from megatron_asynchzp.sharding.topology import ShardSizeError, ShardSizes
from megatron_asynchzp.zero.schedule import SCHEDULES, ScheduleConfig

_STATES = ("param", "grad", "optim")

# Late enough for the order of units to be known and for allocations to be over.
_TRACED_STEP = 10


def add_asynchzp_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of this plugin to Megatron's parser, as an `extra_args_provider` would."""
    group = parser.add_argument_group(title="asynchzp")
    group.add_argument(
        "--use-asynchzp",
        action="store_true",
        help="Train with hierarchical ZeRO in place of DDP and Megatron's optimizer.",
    )
    for state, default in zip(_STATES, ("ranks per node", "ranks per node", "the whole group")):
        group.add_argument(
            f"--asynchzp-{state}-shard-size",
            type=int,
            default=None,
            metavar="RANKS",
            help=f"Ranks (data x context parallel) that share one copy of the {state} state; "
            f"param and grad must nest, optim must be a multiple of both. Default: {default}.",
        )
    group.add_argument(
        "--asynchzp-schedule",
        choices=SCHEDULES,
        default="threaded",
        help="Who drives the collectives: threads (threaded), the main thread ahead of time "
        "(main-thread), or the main thread on the spot (inline).",
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
        help="Do not compare, once per step, which collectives the ranks issued in which order.",
    )
    group.add_argument(
        "--asynchzp-trace",
        metavar="FILE",
        default=None,
        help="Write a Chrome trace of one step of rank 0: the tenth, or the last but one.",
    )
    group.add_argument(
        "--asynchzp-verify",
        choices=("full", "structure"),
        default="full",
        help="What --load reads to find damage before it loads: the CRC-32 of every record (full), "
        "or manifest, sizes and zip directories without the data (structure). Default: full.",
    )
    add_device_argument(group)
    return parser


def add_device_argument(parser) -> None:
    """The one flag that is read before Megatron can be imported."""
    parser.add_argument(
        "--asynchzp-device",
        choices=("auto", "cpu"),
        default="auto",
        help="auto: the accelerator, or the CPU platform where there is none; cpu: always CPU.",
    )


def resolve_schedule(args: Namespace) -> ScheduleConfig:
    """The schedule that the flags ask for; raises ConfigurationError for one that cannot be."""
    try:
        return ScheduleConfig(
            args.asynchzp_schedule,
            args.asynchzp_prefetch_depth,
            time_limit_s=60.0 * args.distributed_timeout_minutes,
            checks_order=args.asynchzp_check_order,
        )
    except ValueError as error:
        raise ConfigurationError(
            f"--asynchzp-prefetch-depth {args.asynchzp_prefetch_depth}: {error}"
        ) from error


def resolve_trace(args: Namespace) -> TraceRequest | None:
    """What --asynchzp-trace asks of this rank; raises ConfigurationError for a place that is not
    there, now rather than when the step has run."""
    if args.asynchzp_trace is None or args.rank != 0:
        return None
    path = Path(args.asynchzp_trace)
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigurationError(
            f"--asynchzp-trace {path}: no such folder; name a file in a folder that exists"
        )
    # Not the last: what comes after it, and ends the trace, may be an evaluation.
    num_steps = args.train_iters or _TRACED_STEP + 1
    return TraceRequest(path, max(1, min(_TRACED_STEP, num_steps - 1)))


def refuse_yaml(argv: list[str], flag: str) -> None:
    """Raise ConfigurationError for --yaml-cfg, which drops `flag` with all others while parsing."""
    if {flag, "--yaml-cfg"} <= {word.partition("=")[0] for word in argv}:
        raise ConfigurationError(
            f"--yaml-cfg is not supported with {flag}: Megatron then ignores all other "
            f"flags, {flag} included; pass the settings as flags"
        )


# --- shard sizes -------------------------------------------------------------------------------


def sharding_group_size(args: Namespace) -> int:
    """Ranks over which dense parameters are sharded: data x context parallel."""
    return args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)


def sharding_ranks_per_node(args: Namespace) -> int:
    """How many ranks of one sharding group a node holds, reduced to a divisor of the group.

    Megatron orders ranks tp-cp-dp-pp, or tp-cp-pp-dp with --use-tp-pp-dp-mapping. torchrun tells
    each rank how many ranks its node has.
    """
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    pipeline = args.pipeline_model_parallel_size if args.use_tp_pp_dp_mapping else 1
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    group_size = sharding_group_size(args)
    ranks = (
        replica * tensor * context * pipeline + part * tensor
        for replica in range(group_size // context)
        for part in range(context)
    )
    return gcd(sum(rank < local_world_size for rank in ranks), group_size)


def resolve_shard_sizes(args: Namespace, group_size: int, ranks_per_node: int) -> ShardSizes:
    """The three sizes with defaults filled in, for a sharding group of `group_size` ranks.

    A default follows the flags that were given: it is reduced until it nests with them. Experts
    use `ShardSizes.restricted_to` of their own group.

    Raises ConfigurationError, one line, naming the flag and the values that are valid for it.
    """
    given = {state: getattr(args, f"asynchzp_{state}_shard_size") for state in _STATES}
    optim = group_size if given["optim"] is None else given["optim"]
    on_node = gcd(ranks_per_node, optim)
    param = _nested_default(on_node, given["grad"]) if given["param"] is None else given["param"]
    grad = _nested_default(on_node, param) if given["grad"] is None else given["grad"]
    sizes = ShardSizes(param, grad, optim)
    try:
        sizes.check(group_size)
    except ShardSizeError as error:
        raise ConfigurationError(_explain(sizes, given, group_size, error)) from error
    return sizes


def _nested_default(default: int, other: int | None) -> int:
    """`default`, or its common divisor with `other` where neither divides the other."""
    if other is None or other < 1:
        return default
    small, large = sorted((default, other))
    return default if large % small == 0 else gcd(small, large)


def _explain(sizes: ShardSizes, given: dict, group_size: int, error: ShardSizeError) -> str:
    """One line for the user: which flag to change, and to what."""
    divisors = [d for d in range(1, group_size + 1) if group_size % d == 0]
    blamed = [state for state in _STATES if given[state] is not None]
    for state in blamed:
        if getattr(sizes, state) not in divisors:
            return _line(state, sizes, f"does not divide the {group_size} ranks", divisors)
    for state in reversed(blamed):
        valid = [d for d in divisors if _is_nested(sizes, state, d, group_size)]
        if valid:
            return _line(state, sizes, f"does not nest ({error})", valid, group_size)
    return f"{error} (sharding group of {group_size} ranks)"


def _line(state, sizes, fault, valid: Iterable[int], group_size: int | None = None) -> str:
    where = "" if group_size is None else f" in the {group_size} ranks"
    return (
        f"--asynchzp-{state}-shard-size {getattr(sizes, state)} {fault}{where} of the sharding "
        f"group (data x context parallel); valid values: {', '.join(map(str, valid))}"
    )


def _is_nested(sizes: ShardSizes, state: str, value: int, group_size: int) -> bool:
    trial = {name: getattr(sizes, name) for name in _STATES} | {state: value}
    try:
        ShardSizes(**trial).check(group_size)
    except ShardSizeError:
        return False
    return True


# --- what --use-asynchzp switches off ----------------------------------------------------------


@dataclass(frozen=True)
class Normalisation:
    """A Megatron argument that gets one fixed value, because asynchzp does its job."""

    flag: str
    name: str
    value: object
    reason: str


NORMALISATIONS: tuple[Normalisation, ...] = (
    Normalisation(
        "--use-distributed-optimizer",
        "use_distributed_optimizer",
        False,
        "the optimizer state is sharded by --asynchzp-optim-shard-size",
    ),
    Normalisation(
        "--overlap-grad-reduce",
        "overlap_grad_reduce",
        False,
        "gradients are reduced by the engine after each micro-batch",
    ),
    Normalisation(
        "--overlap-param-gather",
        "overlap_param_gather",
        False,
        "parameters are gathered by the engine, unit by unit",
    ),
    Normalisation(
        "--no-gradient-accumulation-fusion",
        "gradient_accumulation_fusion",
        False,
        "gradients are accumulated by the engine, in fp32",
    ),
    Normalisation(
        "--ddp-num-buckets", "ddp_num_buckets", None, "the engine has units, not buckets"
    ),
    Normalisation(
        "--ddp-bucket-size", "ddp_bucket_size", None, "the engine has units, not buckets"
    ),
    Normalisation(
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "ddp_pad_buckets_for_high_nccl_busbw",
        False,
        "the engine has units, not buckets",
    ),
    Normalisation(
        "--ddp-average-in-collective",
        "ddp_average_in_collective",
        False,
        "the engine sums gradients and scales the sum",
    ),
    Normalisation(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "ddp_reduce_scatter_with_fp32_accumulation",
        False,
        "gradients are always reduced in fp32",
    ),
    Normalisation(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "ddp_param_name_patterns_for_fp32_local_accumulation",
        [],
        "gradients are always accumulated in fp32",
    ),
    Normalisation(
        "--create-all-gather-group",
        "create_all_gather_group",
        False,
        "the engine has process groups of its own for gathering",
    ),
)


def normalize_args(args: Namespace) -> list[str]:
    """Give each argument of NORMALISATIONS its value; return one line for each that changed."""
    lines = []
    for rule in NORMALISATIONS:
        if getattr(args, rule.name) != rule.value:
            setattr(args, rule.name, rule.value)
            lines.append(f"{rule.name} = {rule.value}: {rule.reason} ({rule.flag})")
    if (args.fp16 or args.bf16) and not args.accumulate_allreduce_grads_in_fp32:
        args.accumulate_allreduce_grads_in_fp32 = True
        if args.fp16:  # Megatron does the same for bf16 by itself
            lines.append("accumulate_allreduce_grads_in_fp32 = True: gradients are reduced in fp32")
    if args.save and not args.exit_signal_handler and _can_gather_signals():
        args.exit_signal_handler = True
        lines.append(
            "exit_signal_handler = True: SIGTERM lets the step end, saves and ends the run with "
            "status 0 (--exit-signal-handler)"
        )
    return lines


def _can_gather_signals() -> bool:
    """Megatron's handler asks all ranks with nccl or gloo, and fails with Ascend's hccl."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator is None or accelerator.type != "npu"


# --- what must be right before training --------------------------------------------------------


def refuse_sizes(args: Namespace) -> None:
    """Raise ConfigurationError for a world or a batch that the parallel sizes do not divide."""
    model_size = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    if args.world_size % model_size:
        raise ConfigurationError(
            f"{args.world_size} ranks are not a multiple of --tensor-model-parallel-size x "
            f"--pipeline-model-parallel-size x --context-parallel-size = {model_size}; "
            f"start {model_size} ranks or a multiple of it"
        )
    data_size = args.world_size // model_size
    micro, batch = args.micro_batch_size, args.global_batch_size
    if micro and batch and not args.rampup_batch_size and batch % (micro * data_size):
        raise ConfigurationError(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x "
            f"{data_size} data-parallel ranks; use a multiple of {micro * data_size}"
        )


def refuse_missing_data(args: Namespace) -> None:
    """Raise ConfigurationError for a dataset that is not there, before anything is built."""
    for flag, path in _argument_files(args):
        if not Path(path).is_file():
            raise ConfigurationError(f"{flag} {path}: no such file")
    for flag, prefix in _dataset_prefixes(args):
        if "://" in prefix:  # object storage: Megatron opens it itself
            continue
        needed = [prefix] if args.sft else [prefix + ".idx", prefix + ".bin"]
        missing = [path for path in needed if not Path(path).is_file()]
        if missing:
            raise ConfigurationError(
                f"{flag} {prefix}: no dataset there ({' and '.join(missing)} missing); make one "
                "with scripts/prepare_data.py and give its path without .idx or .bin"
            )


def refuse_missing_writer(args: Namespace) -> None:
    """Raise ConfigurationError for --async-save without the package that writes, now rather than
    at the first save."""
    asks = args.async_save and args.use_persistent_ckpt_worker and args.async_strategy == "nvrx"
    if asks and find_spec("nvidia_resiliency_ext") is None:
        raise ConfigurationError(
            "--async-save: its writer is not installed; install nvidia-resiliency-ext, or add "
            "--async-strategy mcore"
        )


def _argument_files(args: Namespace) -> list[tuple[str, str]]:
    names = ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path")
    return [(_flag(name), getattr(args, name)) for name in names if getattr(args, name)]


def _dataset_prefixes(args: Namespace) -> Iterable[tuple[str, str]]:
    from megatron.core.datasets.utils import get_blend_from_list

    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if words := getattr(args, name):
            yield from ((_flag(name), prefix) for prefix in get_blend_from_list(words)[0])
    if args.data_args_path:
        words = Path(args.data_args_path).read_text().split()
        yield from ((_flag("data_args_path"), p) for p in get_blend_from_list(words)[0])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def prepare_args(args: Namespace) -> list[str]:
    """Everything that happens to the arguments before Megatron validates (and prints) them.

    Writes the resolved shard sizes into `args` and applies NORMALISATIONS; returns the lines to
    log on rank 0. Raises ConfigurationError, one line, for a run that cannot start, and has
    changed nothing then.
    """
    refuse_unsupported(args)
    refuse_sizes(args)
    resolve_schedule(args)
    resolve_trace(args)
    sizes = resolve_shard_sizes(args, sharding_group_size(args), sharding_ranks_per_node(args))
    refuse_missing_data(args)
    refuse_missing_writer(args)
    for state in _STATES:
        setattr(args, f"asynchzp_{state}_shard_size", getattr(sizes, state))
    return normalize_args(args)


def confirm_args(args: Namespace) -> None:
    """After Megatron's validation: raise ConfigurationError for what it switched on again."""
    refuse_unsupported(args)
    for rule in NORMALISATIONS:
        if getattr(args, rule.name) != rule.value:
            raise ConfigurationError(
                f"Megatron set {rule.name} to {getattr(args, rule.name)}, which --use-asynchzp "
                f"needs to be {rule.value}: {rule.reason}"
            )
