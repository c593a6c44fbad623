# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a collective is named that is not the engine's: Megatron, or a script, called it."""

import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_asynchzp.errors import name_ranks

_TORCH = str(Path(torch.__file__).parent)
_ENGINE = Path(__file__).parents[1] / "comm"
_ALL_MEET = ("barrier", "all_", "reduce_scatter", "monitored_barrier")  # none ends before all began


def collective_of(error: BaseException) -> str | None:
    """Operation, ranks and caller of the collective of torch.distributed in which `error` was
    raised; None for an error of something else."""
    return _named(frame for frame, _ in traceback.walk_tb(error.__traceback__))


def collective_of_main_thread() -> str | None:
    """Describe the collective in which the main thread is now, as `collective_of` does."""
    return _named(reversed(_frames_of_main_thread()))


def calls_of_main_thread() -> dict[str, int]:
    """Count this rank's collectives in each group in which its main thread may wait for all others:
    that of the collective in which it is, and, where calls return before they have ended, the
    default one."""
    groups = [dist.group.WORLD] if dist.is_initialized() and dist.get_backend() != "gloo" else []
    for frame in reversed(_frames_of_main_thread()):
        if frame.f_code.co_filename == distributed_c10d.__file__:
            if frame.f_code.co_name.startswith(_ALL_MEET):
                groups.append(_group_of(frame))
            break
    found = {group.group_name: num_called(group.group_name) for group in groups if group}
    return {name: called for name, called in found.items() if called is not None}


def num_called(name: str) -> int | None:
    """Collectives that this rank has called in a process group; None where nobody can tell."""
    try:
        group = distributed_c10d._resolve_process_group(name)  # pyright: ignore
        return group._get_sequence_number_for_group()  # pyright: ignore
    except (RuntimeError, ValueError, AttributeError, KeyError):  # not of this rank, another kind
        return None


def where_main_thread_stands() -> object:
    """A place in a program at which the main thread waits for other ranks, and no longer in the
    engine, which ends such a wait itself; None where it does not. For other threads."""
    frames = _frames_of_main_thread()
    if not frames or any(Path(frame.f_code.co_filename).parent == _ENGINE for frame in frames):
        return None
    # Where calls return before they have ended it may wait for a device anywhere.
    is_ahead = dist.is_initialized() and dist.get_backend() != "gloo"
    is_waiting = is_ahead or is_main_thread_waiting()
    return (id(frames[0]), frames[0].f_lasti) if is_waiting else None


def _frames_of_main_thread() -> list[FrameType]:
    """The innermost first."""
    frames_of = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames_of.get(threading.main_thread().ident or 0)
    return [frame for frame, _ in traceback.walk_stack(frame)] if frame is not None else []


def is_main_thread_waiting() -> bool:
    """Whether the main thread is in a collective, of torch or of the engine. For other threads."""
    files = {Path(frame.f_code.co_filename) for frame in _frames_of_main_thread()}
    return Path(distributed_c10d.__file__) in files or _ENGINE in {file.parent for file in files}


def _named(frames: Iterable[FrameType]) -> str | None:
    """Name the collective and its caller. frames: the outermost first."""
    caller = "the script"
    for frame in frames:
        code = frame.f_code
        if code.co_filename == distributed_c10d.__file__:
            return f"{code.co_name} over {name_ranks(_ranks_of(frame))}, called by {caller},"
        if not code.co_filename.startswith(_TORCH):
            caller = code.co_name
    return None


def _ranks_of(frame: FrameType) -> list[int]:
    group = _group_of(frame)
    return [] if group is None else sorted(dist.get_process_group_ranks(group))


def _group_of(frame: FrameType) -> dist.ProcessGroup | None:
    group = frame.f_locals.get("group")
    return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
