# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the places where Megatron's saving and loading of checkpoints is patched. Must not know what
the replacements do beyond calling the guard. Nothing happens on import.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from megatron_asynchzp.mcore.patching import Patch, run_args


def _guarded_by(name: str, *wanted: str) -> Callable[[Callable], Callable]:
    """Makes the replacement that hands the original to `name` of guard.py, as a call without
    arguments, with the run's arguments and those of the call that are `wanted`."""

    def make(original: Callable) -> Callable:
        def replacement(*args: Any, **options: Any) -> Any:
            run = run_args()
            if run is None or options.get("non_persistent_ckpt", False):
                return original(*args, **options)
            from megatron_asynchzp.mcore.checkpoint import guard

            given = signature(original).bind(*args, **options)
            given.apply_defaults()
            values = [given.arguments[one] for one in wanted]
            return getattr(guard, name)(partial(original, *args, **options), run, *values)

        return replacement

    return make


def _make_load_args(original: Callable) -> Callable:
    def load_args_from_checkpoint(args, load_arg="load", *rest, **options):
        call = partial(original, args, load_arg, *rest, **options)
        if not getattr(args, "use_asynchzp", False):  # there are no global arguments yet
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


# fmt: off
CHECKPOINT_PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.training.checkpointing",
        "save_checkpoint",
        ("iteration", "model", "optimizer", "opt_param_scheduler",
         "num_floating_point_operations_so_far", "checkpointing_context", "pipeline_rank",
         "expert_rank", "tensor_rank", "pipeline_parallel", "expert_parallel",
         "non_persistent_ckpt", "train_data_iterator", "preprocess_common_state_dict_fn",
         "release", "tp_group", "pp_group", "dp_cp_group", "dp_group", "expt_dp_group",
         "rng_state_key_prefix"),
        _guarded_by("guard_save_checkpoint", "iteration"),
        "one run at a time saves into a directory, and a full disk ends a run in one line",
        "Megatron does both",
    ),
    Patch(
        "megatron.core.dist_checkpointing.serialization",
        "save",
        ("sharded_state_dict", "checkpoint_dir", "sharded_strategy", "validate_access_integrity",
         "async_sharded_save", "preprocess_common_before_consistancy_check", "content_metadata",
         "async_strategy", "verify_integrity"),
        _guarded_by("guard_save", "checkpoint_dir"),
        "what an earlier save left in the directory is removed before, and a manifest that makes "
        "the checkpoint complete is written after, but before Megatron's tracker names it",
        "Megatron's integrity.json needs no second reading of the data",
    ),
    Patch(
        "megatron.training.checkpointing",
        "load_checkpoint",
        ("ddp_model", "optimizer", "opt_param_scheduler", "load_arg", "strict",
         "checkpointing_context", "skip_load_to_model_and_opt", "tp_group", "pp_group",
         "dp_cp_group", "dp_group", "expt_dp_group", "rng_state_key_prefix"),
        _guarded_by("guard_load_checkpoint", "load_arg"),
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
        ("load_dir", "args", "rank0", "sharded_state_dict", "iteration", "release",
         "checkpointing_context", "dp_cp_group", "expt_dp_group"),
        _guarded_by("guard_load_global", "load_dir", "rank0", "sharded_state_dict", "iteration",
                    "release"),
        "a checkpoint of another model is refused before anything of this one is overwritten",
        "Megatron compares on all ranks before it loads",
    ),
)
# fmt: on
