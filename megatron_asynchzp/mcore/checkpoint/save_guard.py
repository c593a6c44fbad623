# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Guards saving: one run at a time in a directory, a manifest at the end, one line a failure."""

import logging
import os
import queue
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_asynchzp.checkpoint_files.errors import one_line
from megatron_asynchzp.checkpoint_files.peers import on_first
from megatron_asynchzp.checkpoint_files.saving import (
    SaveLock,
    complete_directory,
    prepare_directory,
    save_error,
)
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.engine.failure.other_collective import collective_of
from megatron_asynchzp.engine.failure.saves import SaveLog
from megatron_asynchzp.mcore.checkpoint.aliases import complete_index
from megatron_asynchzp.mcore.checkpoint.frozen import drop_frozen, is_trained_only
from megatron_asynchzp.mcore.checkpoint.local import LOCAL, file_errors
from megatron_asynchzp.mcore.checkpoint.operation import Save, in_progress
from megatron_asynchzp.mcore.checkpoint.progress import bytes_in, log_progress
from megatron_asynchzp.mcore.checkpoint.world import log, peers_of_job

# Where Megatron logs what became of a write; the exception that follows does not hold it.
_WRITER = filesystem_async.__name__


def claim_save_directory(args: Namespace) -> None:
    """Make this run the only one that saves into --save, or refuse it. Collective; idempotent."""
    if getattr(args, "save", None):
        peers = peers_of_job()
        log([on_first(peers, partial(SaveLock.claim, args.save))], peers)


def guard_save_checkpoint(
    save: Callable[[], Any], args: Namespace, saves: SaveLog, iteration: Any, non_persistent: bool
) -> Any:
    """Call Megatron's save_checkpoint. Raises SaveError (the disk) or CollectiveFailure."""
    claim_save_directory(args)
    if not args.async_save:
        return_results_in_process()
    name = f"iter_{int(iteration):07d}"
    if non_persistent and args.non_persistent_ckpt_type == LOCAL:
        folder = Path(args.non_persistent_local_ckpt_dir, name)
        operation = in_progress(Save(args, is_local=True))
        with _explaining(saves, folder), operation, file_errors():
            return save()
    place = non_persistent_dir(args, args.save) if non_persistent else args.save or "."
    operation = in_progress(Save(args, is_local=False))
    with _explaining(saves, Path(place, name)), operation:
        return save()


def return_results_in_process() -> None:
    """Let the writer of synchronous saves return its results on a queue within the process.

    Megatron makes a manager's queue: another Python process per rank, with torch imported, for a
    writer in threads. It takes seconds and half a gigabyte, and outlives a killed rank. Does
    nothing if a queue exists. Saves during training need Megatron's.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def guard_save(
    save: Callable[[], Any], args: Namespace, saves: SaveLog, iteration_dir: Path | str, state: Any
) -> Any:
    """Call dist_checkpointing.save into a clean directory; write a manifest after all ranks."""
    peers = peers_of_job()
    if is_trained_only(args):
        drop_frozen(state)
    prepare_directory(iteration_dir, peers)
    written = partial(bytes_in, iteration_dir)
    with (
        _explaining(saves, iteration_dir),
        log_progress(f"writing {iteration_dir}", written, peers.rank == 0),
    ):
        request = save()
    keeps_plans = getattr(args, "ckpt_assume_constant_structure", False)
    amend = partial(complete_index, keeps_plans=keeps_plans)
    complete = partial(complete_directory, iteration_dir, peers, amend)
    if request is None:
        complete()
    else:
        # Megatron appends the function that names this checkpoint as the latest after these.
        guarded = [_explained(saves, fn, iteration_dir) for fn in request.finalize_fns]
        request.finalize_fns[:] = [*guarded, complete, partial(saves.pending.remove, iteration_dir)]
        saves.pending.append(iteration_dir)
    return request


def guard_finalizing(finalize: Callable[[], Any], saves: SaveLog) -> Any:
    with _naming_save(saves, None) if saves.pending else nullcontext():
        return finalize()


def _explained(
    saves: SaveLog, finalize: Callable[[], Any], iteration_dir: Path | str
) -> Callable[[], Any]:
    @wraps(finalize)
    def guarded() -> Any:
        with _explaining(saves, iteration_dir):
            return finalize()

    return guarded


class _WriterLog(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.reason: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.reason = self.reason or record.getMessage().rpartition("error: ")[2]


@contextmanager
def _explaining(saves: SaveLog, iteration_dir: Path | str) -> Iterator[None]:
    writer = _WriterLog()
    logging.getLogger(_WRITER).addHandler(writer)
    try:
        with _naming_save(saves, iteration_dir):
            yield
    except (CheckpointException, OSError) as error:
        reason = one_line(error)
        if isinstance(error, CheckpointException):
            ranks = ", ".join(str(rank) for rank in sorted(error.failures)) or "elsewhere"
            reason = writer.reason or f"rank {ranks} could not write its file"
        raise save_error(iteration_dir, f"{reason}{_free_space(iteration_dir)}") from error
    finally:
        logging.getLogger(_WRITER).removeHandler(writer)


@contextmanager
def _naming_save(saves: SaveLog, iteration_dir: Path | str | None) -> Iterator[None]:
    """Name the checkpoint in a failure of a torch collective (None: as for `entering`)."""
    with saves.entering(iteration_dir):
        try:
            yield
        except RuntimeError as error:
            collective = collective_of(error)
            if collective is None or isinstance(error, (CollectiveFailure, torch.OutOfMemoryError)):
                raise
            raise CollectiveFailure.of(saves.title(collective) or collective, error) from error


def _free_space(iteration_dir: Path | str) -> str:
    try:
        status = os.statvfs(Path(iteration_dir).parent)
    except OSError:
        return ""
    return f" ({status.f_bavail * status.f_frsize >> 20} MiB are free there)"


def non_persistent_dir(args: Namespace, folder: str | None) -> str:
    return args.non_persistent_global_ckpt_dir or os.path.join(folder or "", "non_persistent")
