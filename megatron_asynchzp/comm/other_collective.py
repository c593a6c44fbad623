# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a collective is named that is not the engine's: Megatron, or a script, called it, maybe
for the save of a checkpoint, in which ranks wait for each other's files.
"""

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_asynchzp.comm.roll_call import name_ranks

_TORCH = str(Path(torch.__file__).parent)

# Checkpoints that the main thread is saving; the last is the one that it is in.
_saves: list[str] = []


def collective_of(error: BaseException) -> str | None:
    """Operation, ranks and caller of the collective of torch.distributed in which `error` was
    raised; None for an error of something else."""
    return _named(frame for frame, _ in traceback.walk_tb(error.__traceback__))


def collective_of_main_thread() -> str | None:
    """The same of that in which the main thread is now."""
    frames_of = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames_of.get(threading.main_thread().ident or 0)
    frames = [frame for frame, _ in traceback.walk_stack(frame)] if frame is not None else []
    return _named(reversed(frames))


@contextmanager
def naming_save(folder: Path | str) -> Iterator[None]:
    """What the main thread does within is part of the save of `folder`."""
    _saves.append(str(folder))
    try:
        yield
    finally:
        _saves.pop()


def title_in_save(where: str | None) -> str | None:
    """What the main thread is in, for a line: `where`, a collective if it is one, as part of the
    save in progress; None where there is no save."""
    return " in ".join(filter(None, [where, f"the save of {_saves[-1]}"])) if _saves else None


def is_writing() -> bool:
    """Whether the main thread is in a save and in no collective: others may wait for its files."""
    return bool(_saves) and collective_of_main_thread() is None


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
