# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which checkpoint of a directory a run loads: the newest that is complete and intact.

Megatron's tracker file is a hint.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from megatron_asynchzp.checkpoint_files.errors import Damage, one_line
from megatron_asynchzp.checkpoint_files.index import CONFIG
from megatron_asynchzp.checkpoint_files.manifest import MANIFEST, read_manifest
from megatron_asynchzp.checkpoint_files.other_format import is_of_format_torch
from megatron_asynchzp.checkpoint_files.small_files import replace_file
from megatron_asynchzp.checkpoint_files.verification import (
    INTERRUPTED,
    Peers,
    VerifyLevel,
    check_checkpoint,
    on_first,
)
from megatron_asynchzp.errors import ConfigurationError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")
_REMEDY = "remove these directories to start from scratch, or give another --load"


class Choice(NamedTuple):
    """The checkpoint to load."""

    folder: Path
    lines: tuple[str, ...] = ()  # for the user: each skipped checkpoint and why

    @property
    def is_release(self) -> bool:
        return self.folder.name == RELEASE

    @property
    def iteration(self) -> int:
        return max(0, _number(self.folder.name))

    @property
    def saved_at(self) -> float:
        return _saved_at(self.folder)


class _Listing(NamedTuple):
    candidates: list[str]  # best first
    unfinished: list[str]  # left by interrupted saves, the highest iteration first
    has_tracker: bool


def _number(name: str) -> int:
    return -1 if name == RELEASE else int(name.removeprefix("iter_"))


def read_tracker(load_dir: Path) -> str | None:
    """Return the directory's name in the tracker; None if the tracker names none."""
    try:
        text = (load_dir / TRACKER).read_bytes()[:64].decode().strip()
    except (OSError, ValueError):
        return None
    if text == RELEASE:
        return RELEASE
    return f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,18}", text) else None


def list_unfinished(load_dir: Path | str) -> list[str]:
    """Name the directories of saves that never ended, the highest iteration first.

    They lack every mark of a complete checkpoint, so they never were one.
    """
    return _list(Path(load_dir)).unfinished


def _list(load_dir: Path) -> _Listing:
    """List the directory's checkpoints in any state. Raises OSError.

    The best has the highest number, unless it was saved before the one that the tracker names:
    then it belongs to a run that has gone back to an earlier step since.
    """
    present = [path.name for path in load_dir.iterdir()] if load_dir.exists() else []
    names = [name for name in present if name == RELEASE or _ITERATION.fullmatch(name)]
    names.sort(key=_number, reverse=True)
    unfinished = [name for name in names if _is_unfinished(load_dir / name)]
    candidates = [name for name in names if name not in unfinished]
    current = read_tracker(load_dir)

    @functools.cache  # of few: a manifest may name many thousand files
    def saved_at(name: str) -> float:
        return _saved_at(load_dir / name)

    if current not in candidates:
        sealed = [name for name in candidates if (load_dir / name / MANIFEST).exists()]
        current = max(sealed or candidates[:1], key=saved_at, default=RELEASE)
    left_behind = [
        name
        for name in candidates
        if _number(name) > _number(current) and saved_at(name) < saved_at(current)
    ]
    best_first = [name for name in candidates if name not in left_behind] + left_behind
    return _Listing(best_first, unfinished, TRACKER in present)


def _is_unfinished(folder: Path) -> bool:
    is_complete = any((folder / last).exists() for last in (CONFIG, MANIFEST))
    return folder.is_dir() and not is_complete and not is_of_format_torch(folder)


def _saved_at(folder: Path) -> float:
    try:
        if (manifest := read_manifest(folder)) is not None:
            return manifest.saved_at
    except (Damage, OSError):
        pass  # judged when its turn comes
    try:
        return (folder if is_of_format_torch(folder) else folder / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def choose_checkpoint(
    load_dir: Path | str,
    wanted_step: int | None = None,  # the only iteration that will do
    peers: Peers | None = None,  # ranks that share the reading, collectively, and the result
    level: VerifyLevel = VerifyLevel.FULL,
) -> Choice | None:
    """Return the newest complete and intact checkpoint; None if there has never been one.

    Raises ConfigurationError if none is intact, on all ranks.
    """
    load_dir, peers = Path(load_dir), peers or Peers()
    try:
        listing = on_first(peers, lambda: _list(load_dir))
    except OSError as error:
        raise ConfigurationError(f"--load {load_dir}: {error.strerror}") from None
    if wanted_step is not None:
        return _choose_step(load_dir, wanted_step, listing, peers, level)
    faults: dict[str, str] = {}
    for name in listing.candidates:
        fault = _find_fault(load_dir / name, peers, level)
        if fault is None:
            newer = [folder for folder in listing.unfinished if _number(folder) > _number(name)]
            skipped = faults | dict.fromkeys(newer, INTERRUPTED)
            lines = [f"{load_dir}: {folder} is skipped: {why}" for folder, why in skipped.items()]
            return Choice(load_dir / name, tuple(lines))
        faults[name] = fault
    if not faults and not listing.has_tracker:
        return None  # at most a run that died in its first save
    faults |= dict.fromkeys(listing.unfinished, INTERRUPTED)
    if not faults:
        raise ConfigurationError(
            f"{load_dir} has {TRACKER}, but no checkpoint; remove that file to start from scratch"
        )
    reasons = "; ".join([f"{name}: {fault}" for name, fault in faults.items()][:3])
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    raise ConfigurationError(f"{load_dir} has no intact checkpoint: {reasons}{more}; {_REMEDY}")


def _choose_step(
    load_dir: Path, step: int, listing: _Listing, peers: Peers, level: VerifyLevel
) -> Choice:
    def find_fault(name: str) -> str | None:
        return _find_fault(load_dir / name, peers, level)

    name = f"iter_{step:07d}"
    fault = INTERRUPTED if name in listing.unfinished else "there is no such directory"
    if name in listing.candidates and (fault := find_fault(name)) is None:
        return Choice(load_dir / name)
    rest = [candidate for candidate in listing.candidates if candidate not in (name, RELEASE)]
    newest = next((candidate for candidate in rest if find_fault(candidate) is None), None)
    remedy = (
        f"the newest intact one is --ckpt-step {_number(newest)}" if newest else "none is intact"
    )
    raise ConfigurationError(f"--ckpt-step {step}: {load_dir / name}: {fault}; {remedy}")


def _find_fault(iteration_dir: Path, peers: Peers, level: VerifyLevel) -> str | None:
    try:
        check_checkpoint(iteration_dir, peers, level)
    except Damage as damage:
        return one_line(damage)
    return None


def repair_tracker(load_dir: Path | str, choice: Choice) -> str | None:
    """Make the tracker name the chosen checkpoint, for tools that believe it.

    Returns a line for the user if it did not. A directory that is not writable stays as it is.
    """
    load_dir = Path(load_dir)
    if read_tracker(load_dir) == choice.folder.name:
        return None
    text = RELEASE if choice.is_release else str(choice.iteration)
    try:
        replace_file(load_dir / TRACKER, text.encode())
    except OSError as error:
        stays = f"{TRACKER} does not name {choice.folder.name}, and stays so"
        return f"{load_dir}: {stays}: {error.strerror}"
    return f"{load_dir}: {TRACKER} now names {choice.folder.name}"
