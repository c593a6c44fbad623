# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the places where Megatron's saving and loading of checkpoints is patched. Must not know what
the replacements do beyond calling the guard. Nothing happens on import.
"""

import functools
from collections.abc import Callable

from megatron_asynchzp.mcore.patching import Patch, run_args


def _make_save_checkpoint(original: Callable) -> Callable:
    def save_checkpoint(iteration, *rest, **options):
        args = run_args()
        if args is None or options.get("non_persistent_ckpt", False):
            return original(iteration, *rest, **options)
        from megatron_asynchzp.mcore.checkpoint.guard import guard_save_checkpoint

        call = functools.partial(original, iteration, *rest, **options)
        return guard_save_checkpoint(call, args, iteration)

    return save_checkpoint


def _make_save(original: Callable) -> Callable:
    def save(sharded_state_dict, checkpoint_dir, *rest, **options):
        call = functools.partial(original, sharded_state_dict, checkpoint_dir, *rest, **options)
        if run_args() is None:
            return call()
        from megatron_asynchzp.mcore.checkpoint.guard import guard_save

        return guard_save(call, checkpoint_dir)

    return save


def _make_load_checkpoint(original: Callable) -> Callable:
    def load_checkpoint(
        ddp_model, optimizer, opt_param_scheduler, load_arg="load", *rest, **options
    ):
        call = functools.partial(
            original, ddp_model, optimizer, opt_param_scheduler, load_arg, *rest, **options
        )
        args = run_args()
        if args is None:
            return call()
        from megatron_asynchzp.mcore.checkpoint.guard import guard_load_checkpoint

        return guard_load_checkpoint(call, args, load_arg)

    return load_checkpoint


def _make_load_args(original: Callable) -> Callable:
    def load_args_from_checkpoint(args, load_arg="load", *rest, **options):
        call = functools.partial(original, args, load_arg, *rest, **options)
        if not getattr(args, "use_asynchzp", False):
            return call()
        from megatron_asynchzp.mcore.checkpoint.guard import guard_load_args

        return guard_load_args(call, args, getattr(args, load_arg))

    return load_args_from_checkpoint


def _make_read_metadata(original: Callable) -> Callable:
    def read_metadata(tracker_filename):
        # No flag is asked: a choice exists only while a guarded function loads.
        from megatron_asynchzp.mcore.checkpoint.guard import chosen_metadata

        chosen = chosen_metadata(tracker_filename)
        return original(tracker_filename) if chosen is None else chosen

    return read_metadata


def _make_load_global(original: Callable) -> Callable:
    def _load_global_dist_base_checkpoint(
        load_dir, args, rank0, sharded_state_dict, iteration, release, *rest, **options
    ):
        if not rank0 and sharded_state_dict is not None and run_args() is not None:
            from megatron.training.checkpointing import get_checkpoint_name

            from megatron_asynchzp.mcore.checkpoint.guard import refuse_another_model

            folder = get_checkpoint_name(load_dir, iteration, release, return_base_dir=True)
            refuse_another_model(args, folder, sharded_state_dict)
        return original(
            load_dir, args, rank0, sharded_state_dict, iteration, release, *rest, **options
        )

    return _load_global_dist_base_checkpoint


CHECKPOINT_PATCHES: tuple[Patch, ...] = (
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
