# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the places where Megatron is patched: what is replaced, by what and why. Must not know what
the replacements do beyond calling the adapter. Nothing happens on import.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from megatron_asynchzp.mcore.checkpoint.patches import CHECKPOINT_PATCHES
from megatron_asynchzp.mcore.patching import Patch, run_args

# --- replacements: each falls through to the original unless its flag was given -----------------


def _make_add_arguments(original: Callable) -> Callable:
    from megatron_asynchzp.mcore.arguments import add_asynchzp_arguments, refuse_yaml
    from megatron_asynchzp.mcore.attention_arguments import add_pasa_arguments

    def add_megatron_arguments(parser: ArgumentParser):
        for flag in ("--use-asynchzp", "--use-pasa-attention"):
            refuse_yaml(sys.argv[1:], flag)
        return add_pasa_arguments(add_asynchzp_arguments(original(parser)))

    return add_megatron_arguments


def _make_validate_args(original: Callable) -> Callable:
    from megatron_asynchzp.mcore import arguments
    from megatron_asynchzp.mcore.attention_arguments import refuse_unsupported_attention

    def validate_args(args: Namespace, defaults: dict = {}):  # noqa: B006, as in Megatron
        is_asynchzp = getattr(args, "use_asynchzp", False)
        if getattr(args, "use_pasa_attention", False):
            refuse_unsupported_attention(args)
        lines = arguments.prepare_args(args) if is_asynchzp else []
        lines += _apply_platform_defaults(args)
        result = original(args, defaults)
        if is_asynchzp:
            arguments.confirm_args(args)
        if args.rank == 0:
            for line in lines:
                print(f"megatron_asynchzp: {line}", flush=True)
        return result

    return validate_args


def _apply_platform_defaults(args: Namespace) -> list[str]:
    from megatron_asynchzp.mcore import cpu_platform
    from megatron_asynchzp.mcore.unsupported import ConfigurationError

    if not cpu_platform.is_installed():
        return []
    try:
        changed = cpu_platform.apply_cpu_defaults(args)
    except ValueError as error:
        raise ConfigurationError(" ".join(str(error).split())) from error
    return [f"CPU platform: {'; '.join(changed)}"] if changed else []


def _wrap(args: Namespace, model_chunks: Sequence, ddp_config: Any, pg_collection: Any) -> list:
    from megatron_asynchzp.mcore.arguments import (
        resolve_schedule,
        resolve_shard_sizes,
        resolve_trace,
        sharding_ranks_per_node,
    )
    from megatron_asynchzp.mcore.checkpoint.guard import claim_save_directory
    from megatron_asynchzp.mcore.data_parallel import wrap_model_chunks

    if pg_collection is None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    claim_save_directory(args)
    group_size = pg_collection.dp_cp.size()
    chunks = wrap_model_chunks(
        model_chunks,
        ddp_config,
        pg_collection,
        resolve_shard_sizes(args, group_size, sharding_ranks_per_node(args)),
        data_parallel_random_init=args.data_parallel_random_init,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        schedule=resolve_schedule(args),
        trace=resolve_trace(args),
        saves_beside_training=args.async_save,
    )
    if args.rank == 0:
        from megatron_asynchzp.mcore.start_table import format_start_table

        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
        print(format_start_table(chunks, ranks_per_node, args.optimizer), flush=True)
    return chunks


def _make_ddp_wrap(original: Callable) -> Callable:
    def _ddp_wrap(model, data_parallel_random_init, ddp_config, *rest, pg_collection, **options):
        args = run_args()
        if args is None:
            return original(
                model,
                data_parallel_random_init,
                ddp_config,
                *rest,
                pg_collection=pg_collection,
                **options,
            )
        return _wrap(args, model, ddp_config, pg_collection)

    return _ddp_wrap


def _make_wrap_chunks(original: Callable) -> Callable:
    def wrap_model_chunks_with_ddp(
        model_chunks, config, ddp_config, *, pg_collection=None, **options
    ):
        args = run_args()
        if args is None:
            return original(
                model_chunks, config, ddp_config, pg_collection=pg_collection, **options
            )
        return _wrap(args, model_chunks, ddp_config, pg_collection)

    return wrap_model_chunks_with_ddp


def _make_get_optimizer(original: Callable) -> Callable:
    def get_megatron_optimizer(config, model_chunks, config_overrides=None, *rest, **options):
        if run_args() is None:
            return original(config, model_chunks, config_overrides, *rest, **options)
        from megatron_asynchzp.mcore.optimizer import get_asynchzp_optimizer

        pg_collection = options.get("pg_collection")
        return get_asynchzp_optimizer(config, model_chunks, config_overrides, pg_collection)

    return get_megatron_optimizer


# What Megatron's line about an iteration has, and nothing else it prints on the last rank.
_ITERATION_LINE = "elapsed time per iteration (ms):"


def _make_print_rank_last(original: Callable) -> Callable:
    def print_rank_last(message):
        from megatron_asynchzp.mcore.communication import Communication

        if _ITERATION_LINE in str(message) and (communication := Communication.current()):
            message += communication.take_log_text()
        return original(message)

    return print_rank_last


def _make_destroy_process_group(original: Callable) -> Callable:
    def destroy_process_group(group=None):
        from megatron_asynchzp.mcore.communication import Communication

        Communication.close_all(group)
        return original(group)

    return destroy_process_group


def _make_build_module(original: Callable) -> Callable:
    def build_module(spec_or_module, *args, **kwargs):
        if (run := run_args("use_pasa_attention")) is not None:
            from megatron_asynchzp.mcore.attention import use_pasa_in
            from megatron_asynchzp.mcore.attention_arguments import pasa_options

            spec_or_module = use_pasa_in(spec_or_module, pasa_options(run))
        return original(spec_or_module, *args, **kwargs)

    return build_module


PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.training.arguments",
        "add_megatron_arguments",
        ("parser",),
        _make_add_arguments,
        "scripts that are not ours must understand our flags",
        "Megatron reads argument providers from entry points",
    ),
    Patch(
        "megatron.training.arguments",
        "validate_args",
        ("args", "defaults"),
        _make_validate_args,
        "what asynchzp does not support is refused, and what it replaces is switched off, before "
        "Megatron's own checks act on it",
        "Megatron calls a hook of the plugin before and after its checks",
    ),
    Patch(
        "megatron.training.models.dist_utils",
        "_ddp_wrap",
        (
            "model",
            "data_parallel_random_init",
            "ddp_config",
            "overlap_param_gather_with_optimizer_step",
            "use_megatron_fsdp",
            "use_torch_fsdp2",
            "pg_collection",
        ),
        _make_ddp_wrap,
        "model builders (pretrain_gpt.py, pretrain_hybrid.py) choose the wrapper here",
        "build_distributed_models takes the wrapper's class",
    ),
    Patch(
        "megatron.training.training",
        "wrap_model_chunks_with_ddp",
        (
            "model_chunks",
            "config",
            "ddp_config",
            "use_layer_wise_distributed_optimizer",
            "use_layer_wise_param_layout",
            "DP",
            "pg_collection",
            "bucket_sizes",
            "disable_bucketing_per_chunk",
        ),
        _make_wrap_chunks,
        "scripts that pass a model_provider (get_model) choose the wrapper here",
        "Megatron drops get_model",
    ),
    Patch(
        "megatron.training.training",
        "get_megatron_optimizer",
        (
            "config",
            "model_chunks",
            "config_overrides",
            "use_gloo_process_groups",
            "pg_collection",
            "dump_param_to_param_group_map",
        ),
        _make_get_optimizer,
        "setup_model_and_optimizer builds the optimizer here",
        "the wrapper may supply its own optimizer",
    ),
    Patch(
        "megatron.training.utils",
        "print_rank_last",
        ("message",),
        _make_print_rank_last,
        "the log line of an iteration gets the communication that computation waited for",
        "training_log takes further entries",
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        "destroy_process_group",
        ("group",),
        _make_destroy_process_group,
        "no collective of ours may be on its way, and no thread alive, when its group goes",
        "torch tells of the end of a process group",
    ),
    Patch(
        "megatron.core.transformer.spec_utils",
        "build_module",
        ("spec_or_module", "args", "kwargs"),
        _make_build_module,
        "every attention layer, whatever model it belongs to, gets its core attention from the "
        "spec that is built here",
        "Megatron lets a flag name a core attention",
    ),
    *CHECKPOINT_PATCHES,
)
