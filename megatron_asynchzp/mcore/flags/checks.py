# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What must be right before Megatron builds anything: sizes, files, and what was installed."""

import os
from argparse import Namespace
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.asynchzp import resolve_schedule, resolve_trace
from megatron_asynchzp.mcore.flags.moments import take_moment_dtypes
from megatron_asynchzp.mcore.flags.refusals import refuse_unsupported
from megatron_asynchzp.mcore.flags.shard_sizes import (
    STATES,
    resolve_shard_sizes,
    sharding_group_size,
    sharding_ranks_per_node,
    translated_sizes,
)
from megatron_asynchzp.mcore.flags.switched_off import normalize_args, refuse_changes


def prepare_args(args: Namespace) -> list[str]:
    """Everything that happens to the arguments before Megatron validates (and prints) them.

    Writes the resolved shard sizes into `args` and applies NORMALISATIONS; returns the lines to
    log on rank 0. Raises ConfigurationError, one line, for a run that cannot start, and has
    changed nothing then.
    """
    refuse_unsupported(args)
    refuse_sizes(args)
    resolve_schedule(args)
    refuse_racing_threads(args, runs_on_cuda(args), os.environ)
    resolve_trace(args)
    group_size = sharding_group_size(args)
    sizes = resolve_shard_sizes(args, group_size, sharding_ranks_per_node(args))
    refuse_missing_data(args)
    refuse_missing_writer(args)
    lines = take_moment_dtypes(args)
    if translated_sizes(args, group_size):
        flags = [f"--asynchzp-{state}-shard-size {getattr(sizes, state)}" for state in STATES]
        lines.append(f"the flags of another wrapper have become {' '.join(flags)}")
    for state in STATES:
        setattr(args, f"asynchzp_{state}_shard_size", getattr(sizes, state))
    return lines + normalize_args(args)


def confirm_args(args: Namespace) -> None:
    """After Megatron's validation: raise ConfigurationError for what it switched on again."""
    refuse_unsupported(args)
    refuse_changes(args)


# Who else launches collectives in the middle of a step.
_LAUNCHES_BESIDE_US = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def runs_on_cuda(args: Namespace) -> bool:
    """Whether the run is on a CUDA device, not on the CPU platform or on Ascend."""
    accelerator = torch.accelerator.current_accelerator()
    return args.asynchzp_device != "cpu" and accelerator is not None and accelerator.type == "cuda"


def refuse_racing_threads(args: Namespace, is_cuda: bool, environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a thread that would launch beside another one on CUDA: with
    communicators of Megatron's in one order on some ranks and in another on others, which can hang;
    or where NCCL was told to take two threads for an error."""
    if not is_cuda or args.asynchzp_schedule != "threaded":
        return
    reason = "a background thread launches collectives while the main thread launches"
    for name in _LAUNCHES_BESIDE_US:
        if getattr(args, name) > 1:
            raise ConfigurationError(
                f"--asynchzp-schedule threaded is not supported beside {_flag(name)} on CUDA: "
                f"{reason} Megatron's, in an order that differs between ranks; leave it out"
            )
    if environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0"):
        raise ConfigurationError(
            "--asynchzp-schedule threaded is not supported with NCCL_LAUNCH_ORDER_IMPLICIT: "
            f"{reason} others, which NCCL then ends as a race; leave it out, or unset the variable"
        )


def refuse_yaml(argv: list[str], flag: str) -> None:
    """Raise ConfigurationError for --yaml-cfg, which drops `flag` with all others while parsing."""
    if {flag, "--yaml-cfg"} <= {word.partition("=")[0] for word in argv}:
        raise ConfigurationError(
            f"--yaml-cfg is not supported with {flag}: Megatron then ignores all other "
            f"flags, {flag} included; pass the settings as flags"
        )


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

    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    lists = [(name, getattr(args, name)) for name in names]
    if args.data_args_path:
        lists.append(("data_args_path", Path(args.data_args_path).read_text().split()))
    for name, words in lists:
        if words and (blend := get_blend_from_list(words)) is not None:
            yield from ((_flag(name), prefix) for prefix in blend[0])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
