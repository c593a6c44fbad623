# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the places where Megatron is patched: what is replaced, by what and why. Must not know what
the replacements do beyond calling the adapter. Nothing happens on import.
"""

import functools
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from megatron_asynchzp.mcore.patching import Patch

# --- replacements: each falls through to the original unless its flag was given -----------------


def _training_args(flag: str = "use_asynchzp") -> Namespace | None:
    """Megatron's global arguments if `flag` was given to this run, else None."""
    from megatron.training import get_args

    try:
        args = get_args()
    except AssertionError:  # a library user who never parsed arguments
        return None
    return args if getattr(args, flag, False) else None


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
    from megatron_asynchzp.mcore.checkpoint_guard import claim_save_directory
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
        args = _training_args()
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
        args = _training_args()
        if args is None:
            return original(
                model_chunks, config, ddp_config, pg_collection=pg_collection, **options
            )
        return _wrap(args, model_chunks, ddp_config, pg_collection)

    return wrap_model_chunks_with_ddp


def _make_get_optimizer(original: Callable) -> Callable:
    def get_megatron_optimizer(config, model_chunks, config_overrides=None, *rest, **options):
        if _training_args() is None:
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
        if (run := _training_args("use_pasa_attention")) is not None:
            from megatron_asynchzp.mcore.attention import use_pasa_in
            from megatron_asynchzp.mcore.attention_arguments import pasa_options

            spec_or_module = use_pasa_in(spec_or_module, pasa_options(run))
        return original(spec_or_module, *args, **kwargs)

    return build_module


def _make_save_checkpoint(original: Callable) -> Callable:
    def save_checkpoint(iteration, *rest, **options):
        args = _training_args()
        if args is None or options.get("non_persistent_ckpt", False):
            return original(iteration, *rest, **options)
        from megatron_asynchzp.mcore.checkpoint_guard import guard_save_checkpoint

        call = functools.partial(original, iteration, *rest, **options)
        return guard_save_checkpoint(call, args, iteration)

    return save_checkpoint


def _make_save(original: Callable) -> Callable:
    def save(sharded_state_dict, checkpoint_dir, *rest, **options):
        call = functools.partial(original, sharded_state_dict, checkpoint_dir, *rest, **options)
        if _training_args() is None:
            return call()
        from megatron_asynchzp.mcore.checkpoint_guard import guard_save

        return guard_save(call, checkpoint_dir)

    return save


def _make_load_checkpoint(original: Callable) -> Callable:
    def load_checkpoint(
        ddp_model, optimizer, opt_param_scheduler, load_arg="load", *rest, **options
    ):
        call = functools.partial(
            original, ddp_model, optimizer, opt_param_scheduler, load_arg, *rest, **options
        )
        args = _training_args()
        if args is None:
            return call()
        from megatron_asynchzp.mcore.checkpoint_guard import guard_load_checkpoint

        return guard_load_checkpoint(call, args, load_arg)

    return load_checkpoint


def _make_load_args(original: Callable) -> Callable:
    def load_args_from_checkpoint(args, load_arg="load", *rest, **options):
        call = functools.partial(original, args, load_arg, *rest, **options)
        if not getattr(args, "use_asynchzp", False):
            return call()
        from megatron_asynchzp.mcore.checkpoint_guard import guard_load_args

        return guard_load_args(call, args, getattr(args, load_arg))

    return load_args_from_checkpoint


def _make_read_metadata(original: Callable) -> Callable:
    def read_metadata(tracker_filename):
        # No flag is asked: a choice exists only while a guarded function loads.
        from megatron_asynchzp.mcore.checkpoint_guard import chosen_metadata

        chosen = chosen_metadata(tracker_filename)
        return original(tracker_filename) if chosen is None else chosen

    return read_metadata


def _make_load_global(original: Callable) -> Callable:
    def _load_global_dist_base_checkpoint(
        load_dir, args, rank0, sharded_state_dict, iteration, release, *rest, **options
    ):
        if not rank0 and sharded_state_dict is not None and _training_args() is not None:
            from megatron.training.checkpointing import get_checkpoint_name

            from megatron_asynchzp.mcore.checkpoint_guard import refuse_another_model

            folder = get_checkpoint_name(load_dir, iteration, release, return_base_dir=True)
            refuse_another_model(args, folder, sharded_state_dict)
        return original(
            load_dir, args, rank0, sharded_state_dict, iteration, release, *rest, **options
        )

    return _load_global_dist_base_checkpoint


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
    Patch(
        "megatron.training.checkpointing",
        "save_checkpoint",
        (
            "iteration",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "num_floating_point_operations_so_far",
            "checkpointing_context",
            "pipeline_rank",
            "expert_rank",
            "tensor_rank",
            "pipeline_parallel",
            "expert_parallel",
            "non_persistent_ckpt",
            "train_data_iterator",
            "preprocess_common_state_dict_fn",
            "release",
            "tp_group",
            "pp_group",
            "dp_cp_group",
            "dp_group",
            "expt_dp_group",
            "rng_state_key_prefix",
        ),
        _make_save_checkpoint,
        "one run at a time saves into a directory, and a full disk ends a run in one line",
        "Megatron does both",
    ),
    Patch(
        "megatron.core.dist_checkpointing.serialization",
        "save",
        (
            "sharded_state_dict",
            "checkpoint_dir",
            "sharded_strategy",
            "validate_access_integrity",
            "async_sharded_save",
            "preprocess_common_before_consistancy_check",
            "content_metadata",
            "async_strategy",
            "verify_integrity",
        ),
        _make_save,
        "what an earlier save left in the directory is removed before, and a manifest that makes "
        "the checkpoint complete is written after, but before Megatron's tracker names it",
        "Megatron's integrity.json needs no second reading of the data",
    ),
    Patch(
        "megatron.training.checkpointing",
        "load_checkpoint",
        (
            "ddp_model",
            "optimizer",
            "opt_param_scheduler",
            "load_arg",
            "strict",
            "checkpointing_context",
            "skip_load_to_model_and_opt",
            "tp_group",
            "pp_group",
            "dp_cp_group",
            "dp_group",
            "expt_dp_group",
            "rng_state_key_prefix",
        ),
        _make_load_checkpoint,
        "the newest checkpoint that is complete and intact is loaded, and whatever keeps it from "
        "being loaded is one line and an exit status",
        "Megatron looks at the files before it believes the tracker",
    ),
    Patch(
        "megatron.training.checkpointing",
        "load_args_from_checkpoint",
        ("args", "load_arg", "checkpointing_context"),
        _make_load_args,
        "`--use-checkpoint-args` reads the same checkpoint",
        "as above",
    ),
    Patch(
        "megatron.training.checkpointing",
        "read_metadata",
        ("tracker_filename",),
        _make_read_metadata,
        "the tracker is a hint: while a checkpoint is loaded it says which one was chosen",
        "as above",
    ),
    Patch(
        "megatron.training.checkpointing",
        "_load_global_dist_base_checkpoint",
        (
            "load_dir",
            "args",
            "rank0",
            "sharded_state_dict",
            "iteration",
            "release",
            "checkpointing_context",
            "dp_cp_group",
            "expt_dp_group",
        ),
        _make_load_global,
        "a checkpoint of another model is refused before anything of this one is overwritten",
        "Megatron compares on all ranks before it loads",
    ),
)
