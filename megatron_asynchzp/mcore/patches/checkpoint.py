# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where Megatron saves and loads checkpoints. The replacements only call the guards."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from megatron_asynchzp.checkpoint_files.parts import check_plan, create_read_items
from megatron_asynchzp.engine.failure.saves import SaveLog
from megatron_asynchzp.mcore.checkpoint.operation import current_load
from megatron_asynchzp.mcore.patches.patch import replaces
from megatron_asynchzp.mcore.run.settings import run_args
from megatron_asynchzp.mcore.step.communication import Communication


def _saves() -> SaveLog:
    communication = Communication.current()
    return SaveLog() if communication is None else communication.driver.saves


def _guarded(guard: Callable[[Callable, Any, dict[str, Any]], Any]) -> Callable:
    """Let `guard` make the call, by the run's settings and all arguments, with --use-asynchzp."""

    def replacement(original: Callable, *args: Any, **options: Any) -> Any:
        run, call = run_args(), partial(original, *args, **options)
        if run is None:
            return call()
        given = signature(original).bind(*args, **options)
        given.apply_defaults()
        return guard(call, run, given.arguments)

    return replacement


@replaces(
    "megatron.training.checkpointing.save_checkpoint",
    "iteration model optimizer opt_param_scheduler num_floating_point_operations_so_far "
    "checkpointing_context pipeline_rank expert_rank tensor_rank pipeline_parallel "
    "expert_parallel non_persistent_ckpt train_data_iterator preprocess_common_state_dict_fn "
    "release tp_group pp_group dp_cp_group dp_group[0.19] expt_dp_group[0.19] "
    "rng_state_key_prefix[0.19]",
    why="one run at a time saves into a directory, and a full disk ends a run in one line",
    drop_when="Megatron does both",
)
@_guarded
def save_checkpoint(save: Callable, run: Any, given: dict[str, Any]) -> Any:
    from megatron_asynchzp.mcore.checkpoint.save_guard import guard_save_checkpoint

    iteration, non_persistent = given["iteration"], given["non_persistent_ckpt"]
    return guard_save_checkpoint(save, run, _saves(), iteration, non_persistent)


@replaces(
    "megatron.core.dist_checkpointing.serialization.save",
    "sharded_state_dict checkpoint_dir sharded_strategy common_strategy[-0.18] "
    "validate_access_integrity async_sharded_save preprocess_common_before_consistancy_check "
    "content_metadata async_strategy verify_integrity",
    why="what an earlier save left in the directory is removed before, and a manifest that makes "
    "the checkpoint complete is written after, but before Megatron's tracker names it",
    drop_when="Megatron's integrity.json needs no second reading of the data",
)
@_guarded
def save(call: Callable, run: Any, given: dict[str, Any]) -> Any:
    from megatron_asynchzp.mcore.checkpoint.save_guard import guard_save

    return guard_save(call, run, _saves(), given["checkpoint_dir"], given["sharded_state_dict"])


@replaces(
    "megatron.training.async_utils.maybe_finalize_async_save",
    "blocking terminate",
    why="a run that ends while it waits for a save beside training names that save, and who writes",
    drop_when="Megatron names both",
)
def finalize_saves(original: Callable, *args: Any, **options: Any) -> Any:
    finalize = partial(original, *args, **options)
    if run_args() is None:
        return finalize()
    from megatron_asynchzp.mcore.checkpoint.save_guard import guard_finalizing

    return guard_finalizing(finalize, _saves())


@replaces(
    "megatron.training.checkpointing.load_checkpoint",
    "ddp_model optimizer opt_param_scheduler load_arg strict checkpointing_context "
    "skip_load_to_model_and_opt tp_group pp_group dp_cp_group dp_group[0.19] "
    "expt_dp_group[0.19] rng_state_key_prefix[0.19]",
    why="the newest checkpoint that is complete and intact is loaded, and whatever keeps it from "
    "being loaded is one line and an exit status",
    drop_when="Megatron looks at the files before it believes the tracker",
)
@_guarded
def load_checkpoint(load: Callable, run: Any, given: dict[str, Any]) -> Any:
    from megatron_asynchzp.mcore.checkpoint.load_guard import guard_load_checkpoint

    scheduler, context = given["opt_param_scheduler"], given["checkpointing_context"]
    return guard_load_checkpoint(load, run, given["load_arg"], scheduler, context)


@replaces(
    "megatron.training.checkpointing._get_non_persistent_iteration",
    "non_persistent_global_dir args checkpointing_context",
    why="a non-persistent checkpoint is loaded where it is whole, undamaged, of this run and the "
    "newest",
    drop_when="Megatron looks at the files of both kinds before it chooses",
)
def find_non_persistent(original: Callable, *args: Any, **options: Any) -> int:
    # No flag is asked: only a guarded function makes a load the one in progress.
    load = current_load()
    if load is not None and load.local_iteration is not None:
        return load.local_iteration
    return original(*args, **options)


@replaces(
    "megatron.training.checkpointing.load_args_from_checkpoint",
    "args load_arg checkpointing_context",
    why="`--use-checkpoint-args` reads the same checkpoint",
    drop_when="as above",
)
def load_args(original: Callable, args, load_arg="load", *rest: Any, **options: Any) -> Any:
    call = partial(original, args, load_arg, *rest, **options)
    if not getattr(args, "use_asynchzp", False):
        return call()
    from megatron_asynchzp.mcore.checkpoint.load_guard import guard_load_args

    return guard_load_args(call, args, getattr(args, load_arg))


@replaces(
    "megatron.training.checkpointing.read_metadata",
    "tracker_filename",
    why="the tracker is a hint: while a checkpoint is loaded it names the one that was chosen",
    drop_when="as above",
)
def read_metadata(original: Callable, tracker_filename: str) -> Any:
    # No flag is asked: a choice exists only while a guarded function loads.
    from megatron_asynchzp.mcore.checkpoint.load_guard import chosen_metadata

    chosen = chosen_metadata(tracker_filename)
    return original(tracker_filename) if chosen is None else chosen


@replaces(
    "megatron.training.checkpointing._load_global_dist_base_checkpoint",
    "load_dir args rank0 sharded_state_dict iteration release checkpointing_context "
    "dp_cp_group[0.19] expt_dp_group[0.19]",
    why="a checkpoint of another model is refused before anything of this one is overwritten",
    drop_when="Megatron compares on all ranks before it loads",
)
@_guarded
def load_global(load: Callable, run: Any, given: dict[str, Any]) -> Any:
    from megatron_asynchzp.mcore.checkpoint.load_guard import guard_load_global

    is_common, state = given["rank0"], given["sharded_state_dict"]
    place = given["iteration"], given["release"]
    return guard_load_global(load, run, given["load_dir"], is_common, state, *place)


@replaces(
    "megatron.core.dist_checkpointing.strategies.common.load_common",
    "checkpoint_dir",
    why="megatron-core 0.18 loads the checkpoints of later versions, which keep arguments and step "
    "among the shards",
    drop_when="0.18 is no longer supported",
    last="0.18",
)
def load_common(original: Callable, checkpoint_dir: str) -> Any:
    if run_args() is None:
        return original(checkpoint_dir)
    from megatron_asynchzp.checkpoint_files.index import read_common_state

    return read_common_state(checkpoint_dir)


@replaces(
    "megatron.core.dist_checkpointing.strategies.torch._get_filesystem_reader",
    "checkpoint_dir cache_metadata async_strategy",
    why="a rank reads the index of a checkpoint once for each load, and not for each part of it",
    drop_when="Megatron hands on what it has read",
)
def get_filesystem_reader(original: Callable, *args: Any, **options: Any) -> Any:
    # No flag is asked: only while a guarded function loads is an index read once.
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from megatron_asynchzp.checkpoint_files.index import IndexReader, is_read_once

    reader = original(*args, **options)
    is_plain = is_read_once() and type(reader) is FileSystemReader
    return IndexReader(reader.path) if is_plain else reader


@replaces(
    "torch.distributed.checkpoint.filesystem._write_item",
    "transforms stream data write_item storage_key serialization_format",
    why="a full disk is called one: torch's archive names the byte at which it stopped",
    drop_when="torch raises what its stream raised",
)
def write_item(original: Callable, *args: Any, **options: Any) -> Any:
    try:
        return original(*args, **options)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise cause or error from None


@replaces(
    "torch.distributed.checkpoint.default_planner._validate_global_plan",
    "global_plan metadata",
    why="the check of a save grows with the parts of the model, not with their square: torch "
    "compares pairs of boxes",
    drop_when="torch sorts parts that are runs of elements",
)
def validate_global_plan(original: Callable, global_plan: Any, metadata: Any) -> Any:
    if run_args() is None:
        return original(global_plan, metadata)
    return check_plan(original, global_plan, metadata)


@replaces(
    "torch.distributed.checkpoint.planner_helpers.create_read_items_for_chunk_list",
    "fqn checkpoint_md local_chunks",
    why="a rank finds what it reads by bisection, and a part that no file holds is an error",
    drop_when="as above, and torch compares what it found with what was asked for",
)
def create_read_items_for_chunk_list(
    original: Callable, fqn: str, checkpoint_md: Any, local_chunks: Any
) -> Any:
    create = original if run_args() is None else create_read_items
    return create(fqn, checkpoint_md, local_chunks)


@replaces(
    "megatron.core.dist_checkpointing.validation.determine_global_metadata",
    "sharded_state_dict process_group[0.19]",
    why="whether the shards of all ranks are whole is known from one small sum, where Megatron "
    "gathers their descriptions on each rank",
    drop_when="Megatron compares them without a gather",
)
def determine_global_metadata(
    original: Callable, sharded_state_dict: Any, *group: Any, **named: Any
):
    args, communication = run_args(), Communication.current()
    call = partial(original, sharded_state_dict, *group, **named)
    if args is None or communication is None or not communication.runtimes:
        return call()
    from megatron_asynchzp.mcore.checkpoint.agreement import exchange, needs_all

    if needs_all(args):
        return call()
    (process_group,) = (*group, *named.values()) or (None,)
    device = communication.runtimes[0].units[0].device
    return exchange(call, sharded_state_dict, process_group, device)


@replaces(
    "megatron.core.dist_checkpointing.validation.validate_sharding_integrity",
    "global_metadata common_state_dict",
    why="the other half of the same",
    drop_when="as above",
)
def validate_sharding_integrity(
    original: Callable, global_metadata: Any, common_state_dict: Any = None
) -> Any:
    if run_args() is not None:
        from megatron_asynchzp.mcore.checkpoint.agreement import Agreed

        if isinstance(global_metadata, Agreed):
            global_metadata = []  # only the common parts are compared then
    return original(global_metadata, common_state_dict)
