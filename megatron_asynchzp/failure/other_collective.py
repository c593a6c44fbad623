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


def collective_of(error: BaseException) -> str | None:
    """Operation, ranks and caller of the collective of torch.distributed in which `error` was
    raised; None for an error of something else."""
    return _named(frame for frame, _ in traceback.walk_tb(error.__traceback__))


def collective_of_main_thread() -> str | None:
    """The same of that in which the main thread is now."""
    return _named(reversed(_frames_of_main_thread()))


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
    """frames: the outermost first."""
    caller = "the script"
    for frame in frames:
        code = frame.f_code
        if code.co_filename == distributed_c10d.__file__:
            return f"{code.co_name} over {name_ranks(_ranks_of(frame))}, called by {caller},"
        if not code.co_filename.startswith(_TORCH):
            caller = code.co_name
    return None


def _ranks_of(frame: FrameType) -> list[int]:
    group = frame.f_locals.get("group")
    if not isinstance(group, dist.ProcessGroup):
        group = dist.group.WORLD
    return [] if group is None else sorted(dist.get_process_group_ranks(group))
