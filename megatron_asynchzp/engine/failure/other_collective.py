# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Names collectives that Megatron or a script called, not the engine.

It reads stack frames: a background thread must name the collective that holds the main thread, and
torch keeps no record of that for every backend.
"""

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
# Collectives that end on no rank before all ranks have begun.
_ALL_MEET = ("barrier", "all_", "reduce_scatter", "monitored_barrier")


def collective_of(error: BaseException) -> str | None:
    """Return operation, ranks and caller of the torch collective that raised `error`."""
    return _named(frame for frame, _ in traceback.walk_tb(error.__traceback__))


def collective_of_main_thread() -> str | None:
    return _named(reversed(_frames_of_main_thread()))


def calls_of_main_thread() -> dict[str, int]:
    """Count this rank's collectives in each group whose ranks its main thread may wait for."""
    # If calls return early, it may wait for the default group anywhere.
    groups = [dist.group.WORLD] if dist.is_initialized() and dist.get_backend() != "gloo" else []
    for frame in reversed(_frames_of_main_thread()):
        if frame.f_code.co_filename == distributed_c10d.__file__:
            if frame.f_code.co_name.startswith(_ALL_MEET):
                groups.append(_group_of(frame))
            break
    counts = {group.group_name: num_called(group.group_name) for group in groups if group}
    return {name: called for name, called in counts.items() if called is not None}


def num_called(name: str) -> int | None:
    """Return the number of collectives this rank has called in a group; None if it is unknown."""
    try:
        group = distributed_c10d._resolve_process_group(name)  # pyright: ignore
        return group._get_sequence_number_for_group()  # pyright: ignore
    except (RuntimeError, ValueError, AttributeError, KeyError):  # another rank's, another backend
        return None


def main_thread_position() -> object:
    """Return where the main thread waits for other ranks outside the engine, else None."""
    frames = _frames_of_main_thread()
    if not frames or any(Path(frame.f_code.co_filename).parent == _ENGINE for frame in frames):
        return None
    # If calls return early, the main thread may wait for a device anywhere.
    is_ahead = dist.is_initialized() and dist.get_backend() != "gloo"
    is_waiting = is_ahead or is_main_thread_waiting()
    return (id(frames[0]), frames[0].f_lasti) if is_waiting else None


def _frames_of_main_thread() -> list[FrameType]:
    frames_of = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames_of.get(threading.main_thread().ident or 0)
    return [frame for frame, _ in traceback.walk_stack(frame)] if frame is not None else []


def is_main_thread_waiting() -> bool:
    """Return whether the main thread is in a collective of torch or of the engine."""
    files = {Path(frame.f_code.co_filename) for frame in _frames_of_main_thread()}
    return Path(distributed_c10d.__file__) in files or _ENGINE in {file.parent for file in files}


def _named(frames: Iterable[FrameType]) -> str | None:
    caller = "the script"  # frames: the outermost first
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
    group = frame.f_locals.get("group")  # only the call itself knows its group
    return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
