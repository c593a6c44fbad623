# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what is done around Megatron's saving and loading of checkpoints: which one is loaded, that
it fits, what makes one complete, and one line for each way it can fail. Must not know the format
of the files, nor how the model's state gets into them.
"""

import logging
import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_asynchzp.checkpoint_files.choice import (
    RELEASE,
    Alone,
    Choice,
    Peers,
    choose_checkpoint,
    list_unfinished,
    read_tracker,
    repair_tracker,
)
from megatron_asynchzp.checkpoint_files.errors import CheckpointError, Damage, one_line
from megatron_asynchzp.checkpoint_files.inventory import read_inventory
from megatron_asynchzp.checkpoint_files.ownership import Ownership
from megatron_asynchzp.checkpoint_files.saving import (
    complete_directory,
    prepare_directory,
    save_error,
)
from megatron_asynchzp.mcore.checkpoint import mismatch
from megatron_asynchzp.mcore.checkpoint.aliases import name_main_params
from megatron_asynchzp.mcore.checkpoint.progress import bytes_in, bytes_read, tell_progress
from megatron_asynchzp.mcore.checkpoint.save_queue import return_results_in_process

# Where Megatron logs what became of a write; the exception that follows does not say it.
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"

# What the reading of files can end in. A RuntimeError may also be a peer's death, or ours.
_UNREADABLE = (CheckpointingException, CheckpointException, OSError, EOFError, KeyError)
_UNREADABLE += (AssertionError, pickle.UnpicklingError)
_TORCH_READER = "PytorchStreamReader"

# The checkpoint that the load in progress goes by.
_CHOICE: ContextVar[Choice | None] = ContextVar("asynchzp_choice", default=None)


class Ranks:
    """All ranks of the job, which look at a directory together; see choice.Peers."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def tell(self, make: Callable[[], Any]) -> Any:
        box = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, mine: Any) -> list[Any]:
        all_of_them: list[Any] = [None] * self.size
        dist.all_gather_object(all_of_them, mine)
        return all_of_them


def _peers() -> Peers:
    return Ranks() if dist.is_initialized() else Alone()


def _tell(lines: Any, peers: Peers) -> None:
    if peers.rank == 0:
        for line in lines:
            print(f"megatron_asynchzp: {line}", flush=True)


# --- saving ------------------------------------------------------------------------------------


def claim_save_directory(args: Namespace) -> None:
    """Make this run the only one that saves into --save. Collective; does nothing a second time.

    Raises CheckpointError, on all ranks, where another run does or the directory cannot be used.
    """
    if not getattr(args, "save", None):
        return
    peers = _peers()
    answer = peers.tell(partial(_claim, args.save))
    if isinstance(answer, CheckpointError):
        raise answer
    _tell([answer] if answer else [], peers)


def _claim(save_dir: str) -> str | CheckpointError | None:
    try:
        return Ownership.claim(save_dir)
    except CheckpointError as error:
        return error


def guard_save_checkpoint(save: Callable[[], Any], args: Namespace, iteration: Any) -> Any:
    """Call Megatron's save_checkpoint. Raises SaveError for whatever keeps files from the disk."""
    claim_save_directory(args)
    if not args.async_save:
        return_results_in_process()
    with _telling_why_not(Path(args.save or ".", f"iter_{int(iteration):07d}")):
        return save()


def guard_save(save: Callable[[], Any], iteration_dir: Path | str) -> Any:
    """Call dist_checkpointing.save: into a clean directory, and with a manifest at its end, which
    for an asynchronous save is when all ranks have written. Raises SaveError."""
    peers = _peers()
    prepare_directory(iteration_dir, peers)
    written = partial(bytes_in, iteration_dir)
    with (
        _telling_why_not(iteration_dir),
        tell_progress(f"writing {iteration_dir}", written, peers.rank == 0),
    ):
        request = save()
    complete = partial(complete_directory, iteration_dir, peers, name_main_params)
    if request is None:
        complete()
    else:
        # Megatron appends the function that names this checkpoint as the latest after these.
        guarded = [_telling(fn, iteration_dir) for fn in request.finalize_fns]
        request.finalize_fns[:] = [*guarded, complete]
    return request


def _telling(finalize: Callable[[], Any], iteration_dir: Path | str) -> Callable[[], Any]:
    @wraps(finalize)
    def guarded() -> Any:
        with _telling_why_not(iteration_dir):
            return finalize()

    return guarded


class _WriterLog(logging.Handler):
    """Keeps the first error that Megatron's writer logs."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.reason: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.reason = self.reason or text[text.find("error: ") + len("error: ") :]


@contextmanager
def _telling_why_not(iteration_dir: Path | str) -> Iterator[None]:
    """Turn what keeps a checkpoint from being written into a SaveError."""
    heard = _WriterLog()
    logging.getLogger(_WRITER).addHandler(heard)
    try:
        yield
    except CheckpointException as error:
        ranks = ", ".join(str(rank) for rank in sorted(error.failures))
        reason = heard.reason or f"rank {ranks or 'elsewhere'} could not write its file"
        raise save_error(iteration_dir, f"{reason}{_free_space(iteration_dir)}") from error
    except OSError as error:
        raise save_error(iteration_dir, f"{one_line(error)}{_free_space(iteration_dir)}") from error
    finally:
        logging.getLogger(_WRITER).removeHandler(heard)


def _free_space(iteration_dir: Path | str) -> str:
    try:
        found = os.statvfs(Path(iteration_dir).parent)
    except OSError:
        return ""
    return f" ({found.f_bavail * found.f_frsize >> 20} MiB are free there)"


# --- loading -----------------------------------------------------------------------------------


def guard_load_checkpoint(load: Callable[[], Any], args: Namespace, load_arg: str) -> Any:
    """Call Megatron's load_checkpoint for the newest intact checkpoint, whatever the tracker says.

    Collective. Raises CheckpointError where there is none, or it does not fit.
    """
    claim_save_directory(args)
    peers = _peers()
    load_dir = getattr(args, load_arg)
    with tell_progress(f"reading {load_dir}", bytes_read, peers.rank == 0):
        choice = _choose(load_dir, args, peers)
        if choice is None and getattr(args, "pretrained_checkpoint", None):
            load_dir = args.pretrained_checkpoint
            choice = _choose(load_dir, args, peers)
        return _load_choice(load, args, load_dir, choice)


def guard_load_args(load: Callable[[], Any], args: Namespace, load_dir: str | None) -> Any:
    """Call Megatron's load_args_from_checkpoint, which each rank does by itself: hence without a
    look at the tensors, which all ranks together take before they load them."""
    choice = None
    if load_dir:
        choice = choose_checkpoint(load_dir, args.ckpt_step or None, is_thorough=False)
    return _load_choice(load, args, load_dir, choice)


def _choose(load_dir: str | None, args: Namespace, peers: Peers) -> Choice | None:
    if load_dir is None:
        return None
    choice = choose_checkpoint(load_dir, args.ckpt_step or None, peers)
    if choice is None:
        left = peers.tell(partial(list_unfinished, load_dir))
        _tell([f"{load_dir}: {one} is left of a save that was interrupted" for one in left], peers)
    else:
        _tell(choice.told, peers)
        if not args.ckpt_step:
            line = peers.tell(partial(repair_tracker, load_dir, choice))
            _tell([line] if line else [], peers)
    return choice


def _load_choice(
    load: Callable[[], Any], args: Namespace, load_dir: str | None, choice: Choice | None
) -> Any:
    step, token = args.ckpt_step, _CHOICE.set(choice)
    # Without a tracker file, which a read-only directory may lack, only --ckpt-step is looked at.
    if choice is not None and read_tracker(Path(load_dir)) != choice.folder.name:
        if choice.is_release:
            raise CheckpointError(f"{load_dir}: its tracker file does not say {RELEASE}; write it")
        args.ckpt_step = choice.iteration or None
    where = choice.folder if choice is not None else load_dir
    try:
        return load()
    except SystemExit as end:
        if end.code:
            raise
        reason = f"there is no checkpoint in {where}" if choice is None else f"{where} is refused"
        flag = ", and --exit-on-missing-checkpoint was given"
        why = flag if choice is None and args.exit_on_missing_checkpoint else " (see above)"
        raise CheckpointError(f"{reason}{why}") from None
    except _UNREADABLE as error:
        raise CheckpointError(f"{where} could not be loaded: {one_line(error)}") from error
    except RuntimeError as error:
        if _TORCH_READER not in str(error):
            raise
        raise CheckpointError(f"{where} could not be loaded: {one_line(error)}") from error
    finally:
        args.ckpt_step = step
        _CHOICE.reset(token)


def chosen_metadata(tracker: str) -> tuple[int, bool] | None:
    """What Megatron is to read from this tracker file; None where no choice was made for it."""
    choice = _CHOICE.get()
    if choice is None or Path(tracker).parent != choice.folder.parent:
        return None
    return choice.iteration, choice.is_release


def refuse_another_model(args: Namespace, iteration_dir: str, sharded_state_dict: Any) -> None:
    """Compare the checkpoint with what the run is about to load. Collective.

    Raises CheckpointError, on all ranks, naming the first difference with both values.
    """
    peers = _peers()
    facts = peers.tell(lambda: _read_facts(iteration_dir))
    if isinstance(facts, Damage):
        raise CheckpointError(f"{iteration_dir}: {facts}")
    saved, tensors = facts
    difference = mismatch.find_different_argument(saved, args, args.finetune)
    if difference is None:
        may_miss = args.dist_ckpt_strictness in ("ignore_all", "log_all", "return_all")
        mine = mismatch.find_different_tensor(tensors, sharded_state_dict, may_miss)
        difference = next((one for one in peers.gather(mine) if one), None)
        if difference is None:
            return
        difference = mismatch.explain(difference, saved, args)
    raise CheckpointError(f"{iteration_dir} is of another model: {difference}")


def _read_facts(iteration_dir: str) -> tuple[Any, dict] | Damage:
    from megatron.core.dist_checkpointing import load_common_state_dict

    try:
        tensors = read_inventory(Path(iteration_dir), is_trusted=True).tensors
    except Damage as damage:
        return damage
    return load_common_state_dict(iteration_dir).get("args"), tensors
