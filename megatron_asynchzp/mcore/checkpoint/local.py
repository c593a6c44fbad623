# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the local checkpoint that a run resumes from, if any.

nvidia-resiliency-ext writes, copies and reads them, through Megatron.

[Note: when a local checkpoint is loaded]
A local checkpoint is each rank's own shard, on the disk or in the memory of its node, so it fits
only the ranks and sizes of the run that wrote it. It is loaded if it is at least as new as the
newest shared one, all ranks find their shard or a copy undamaged, and the arguments that shards
depend on are the same. Otherwise the shared one is loaded, with a line that says why, and local
ones are removed, because the library would take them for newer than later ones.
"""

import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_asynchzp.checkpoint_files.errors import one_line
from megatron_asynchzp.checkpoint_files.local_files import (
    LocalFile,
    NodeFolder,
    adopt,
    keep_only,
    lacking,
    remove_damaged,
)
from megatron_asynchzp.checkpoint_files.peers import Peers, on_each
from megatron_asynchzp.errors import ConfigurationError, name_ranks
from megatron_asynchzp.mcore.checkpoint.mismatch import FIXED
from megatron_asynchzp.mcore.flags.shard_sizes import STATES, node_size

LOCAL = "local"
"""The --non-persistent-ckpt-type of local checkpoints."""

# What a rank's shard depends on.
_SHARDS = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
_SHARDS += ("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
_SHARDS += ("virtual_pipeline_model_parallel_size", "use_tp_pp_dp_mapping")
_SHARDS += tuple(f"asynchzp_{state}_shard_size" for state in STATES)

_TORCH_WRITER = "PytorchStreamWriter"  # in what torch.save raises where a disk is full


class Local(NamedTuple):
    """The local checkpoint that is loaded. lines: for the user."""

    iteration: int
    lines: tuple[str, ...] = ()


def find_local(args: Namespace, manager: Any, shared: int, is_wanted: bool, peers: Peers) -> Local:
    """Return the local checkpoint to load; iteration -1 for the shared one. Collective.

    Removes a local one that is not loaded. manager is the library's, shared the newest shared
    iteration or -1, is_wanted whether a newer state is acceptable. Raises ConfigurationError on all
    ranks for a folder that is unusable or belongs to another run.
    """
    place = _place(args, manager)
    try:
        has_own = on_each(peers, lambda: bool(place.files()))
        lines = [file for mine in on_each(peers, partial(_tidy, place, has_own)) for file in mine]
        held = on_each(peers, lambda: [(file.iteration, file.rank) for file in place.files()])
        _check_own_folder(args, place, peers)
        newest = -1
        for iteration in sorted({number for files in held for number, _ in files}, reverse=True):
            reason = "this run starts from another one"
            if is_wanted:
                reason = _reason_against(args, place, held, iteration, shared, peers)
            if reason is None:
                newest = iteration
                break
            lines.append(f"local checkpoint of iteration {iteration} is not loaded: {reason}")
        on_each(peers, partial(keep_only, place, newest))
    except OSError as error:
        raise ConfigurationError(
            f"--non-persistent-local-ckpt-dir {args.non_persistent_local_ckpt_dir}: "
            f"{one_line(error)}"
        ) from error
    manager.latest_iteration = -1  # what it has seen before may be gone
    if newest != -1:
        lines.append(f"local checkpoint of iteration {newest} is loaded")
        if manager.find_latest() != newest:
            raise ConfigurationError(
                f"local checkpoint of iteration {newest}: nvidia-resiliency-ext does not find it; "
                f"remove {place.folder.parent} on all nodes"
            )
    return Local(newest, tuple(lines))


def _place(args: Namespace, manager: Any) -> NodeFolder:
    rank, on_node = args.rank, node_size(args)
    return NodeFolder(Path(manager.local_ckpt_dir), rank, rank // on_node * on_node, on_node)


def _tidy(place: NodeFolder, has_own: Sequence[bool]) -> list[str]:
    adopt(place, has_own)
    return remove_damaged(place)


def _reason_against(
    args: Namespace,
    place: NodeFolder,
    held: list[list[tuple[int, int]]],
    iteration: int,
    shared: int,
    peers: Peers,
) -> str | None:
    if iteration < shared:
        return f"that of iteration {shared} on shared storage is newer"
    mine = partial(_first_difference, args, place, iteration)
    if difference := next(filter(None, on_each(peers, mine)), None):
        return difference
    places = [list(keepers_of(args, rank)) for rank in range(args.world_size)]
    if ranks := lacking(held, iteration, places):
        return f"no copy of the shard of {name_ranks(ranks)} is left"
    return None


def keepers_of(args: Namespace, rank: int) -> Iterable[int]:
    """Return the ranks that keep a copy of its shard, as the library forms its groups."""
    if not args.replication:
        return (rank,)
    jump, factor = args.replication_jump, args.replication_factor
    first = rank // (jump * factor) * jump * factor + rank % jump
    return range(first, first + jump * factor, jump)


def _saved_args(file: LocalFile) -> Any:
    state = torch.load(file.path, map_location="cpu", mmap=True, weights_only=False)
    return state.common_state_dict["args"]


def _first_difference(args: Namespace, place: NodeFolder, iteration: int) -> str | None:
    files = [file for file in place.files() if file.iteration == iteration]
    if not files:
        return None
    try:
        saved = _saved_args(files[0])
    except Exception as error:  # whatever another version's classes make of it
        return f"{files[0].path} cannot be read: {one_line(error)}"
    for name in (*_SHARDS, *FIXED):
        was, now = getattr(saved, name, None), getattr(args, name, None)
        if was != now:
            return f"{name} is {was} there and {now} in this run"
    return None


def _check_own_folder(args: Namespace, place: NodeFolder, peers: Peers) -> None:
    """Raise ConfigurationError on all ranks if the folder belongs to a run that saves elsewhere."""
    # Its checkpoints may be newer, and are not ours to remove.

    def other_save() -> str | None:
        for file in place.files():
            try:
                save = _saved_args(file).save
            except Exception:
                return None  # said when it is compared
            if save is not None and os.path.abspath(save) != os.path.abspath(args.save or ""):
                return save
        return None

    if save := next(filter(None, on_each(peers, other_save)), None):
        raise ConfigurationError(
            f"--non-persistent-local-ckpt-dir {args.non_persistent_local_ckpt_dir} holds local "
            f"checkpoints of the run with --save {save}: name another folder, or remove them"
        )


@contextmanager
def file_errors() -> Iterator[None]:
    """Raise errors of nvidia-resiliency-ext and of torch's writer as OSError."""
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (  # pyright: ignore[reportMissingImports]
        CheckpointingException,
    )

    try:
        yield
    except CheckpointingException as error:
        raise OSError(one_line(error)) from error
    except RuntimeError as error:
        if _TORCH_WRITER not in str(error):
            raise
        raise OSError(one_line(error)) from error
