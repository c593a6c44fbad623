# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which checkpoint of a directory a run starts from: the newest that is complete and intact.
Megatron's tracker file is believed only where that agrees with it. Must not know Megatron.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_asynchzp.checkpoint_files.contents import Contents, find_corruption, read_contents
from megatron_asynchzp.checkpoint_files.errors import CheckpointError, Damage, one_line
from megatron_asynchzp.checkpoint_files.inventory import CONFIG
from megatron_asynchzp.checkpoint_files.manifest import MANIFEST, read_manifest
from megatron_asynchzp.checkpoint_files.small_file import replace_file

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")
_INTERRUPTED = "its save was interrupted"
_REMEDY = "remove these directories to start from scratch, or give another --load"


class Peers(Protocol):
    """The ranks that look at a directory together."""

    rank: int
    size: int

    def tell(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, on all."""

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gives, in their order, on all."""


class Alone:
    """One process that looks at a directory by itself."""

    rank, size = 0, 1

    def tell(self, make: Callable[[], Any]) -> Any:
        return make()

    def gather(self, mine: Any) -> list[Any]:
        return [mine]


@dataclass(frozen=True)
class Choice:
    """The checkpoint to load. iteration is 0 for a release; told: lines for the user."""

    iteration: int
    is_release: bool
    folder: Path
    told: tuple[str, ...]

    @property
    def tracker_text(self) -> str:
        return RELEASE if self.is_release else str(self.iteration)


def read_tracker(load_dir: Path) -> str | None:
    """The name of the directory that the tracker points to; None where it does not."""
    try:
        text = (load_dir / TRACKER).read_bytes()[:64].decode().strip()
    except (OSError, ValueError):
        return None
    if text == RELEASE:
        return RELEASE
    return f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,18}", text) else None


def list_candidates(load_dir: Path) -> list[str]:
    """Names of the checkpoint directories, whatever state they are in, best first: those saved
    after what the tracker points to, that one, the ones before it, and then those that a run left
    behind which has since gone back to an earlier step. Raises OSError."""
    try:
        present = [path.name for path in load_dir.iterdir()]
    except FileNotFoundError:
        return []
    iterations = sorted(
        (name for name in present if _ITERATION.fullmatch(name)), key=_number, reverse=True
    )
    releases = [RELEASE] if RELEASE in present else []
    current = read_tracker(load_dir)
    if current == RELEASE and releases:
        later = [name for name in iterations if _saved_at(load_dir / name, True) is not None]
        return later + releases + [name for name in iterations if name not in later]
    manifests = {name: _saved_at(load_dir / name, True) for name in iterations}
    if current not in iterations:
        sealed = {name: time_s for name, time_s in manifests.items() if time_s is not None}
        current = max(sealed, key=sealed.get) if sealed else None
    if current is None:
        return iterations + releases
    current_s = _saved_at(load_dir / current)
    above = [name for name in iterations if _number(name) > _number(current)]
    newer = [name for name in above if _saved_at(load_dir / name) >= current_s]
    below = [name for name in iterations if _number(name) < _number(current)]
    return newer + [current] + below + [name for name in above if name not in newer] + releases


def _number(name: str) -> int:
    return int(_ITERATION.fullmatch(name)[1])


def _saved_at(folder: Path, only_by_manifest: bool = False) -> float | None:
    """When the checkpoint became complete, in seconds; 0.0 where nothing tells (None, if only a
    manifest counts)."""
    try:
        manifest = read_manifest(folder)
    except Damage:
        manifest = None
    if manifest is not None:
        return manifest.saved_at
    if only_by_manifest:
        return None
    try:
        return (folder / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def list_unfinished(load_dir: Path | str) -> list[str]:
    """Names of directories in which a save never came to its end: they lack all that makes a
    checkpoint complete, so nothing that was once there is lost. Highest iteration first."""
    load_dir = Path(load_dir)
    try:
        names = [path.name for path in load_dir.iterdir() if _ITERATION.fullmatch(path.name)]
    except OSError:
        return []
    unfinished = [
        name
        for name in names
        if (load_dir / name).is_dir()
        and not any((load_dir / name / last).exists() for last in (CONFIG, MANIFEST))
    ]
    return sorted(unfinished, key=_number, reverse=True)


def choose_checkpoint(
    load_dir: Path | str,
    wanted_step: int | None = None,
    peers: Peers | None = None,
    is_thorough: bool = True,
) -> Choice | None:
    """The newest complete and uncorrupted checkpoint; None where there has never been one.

    wanted_step: only this iteration will do. peers: the ranks that share the reading; a collective
    call then, with the same result on all. is_thorough: tensors are read too, not only objects.
    Raises CheckpointError, on all.
    """
    load_dir, peers = Path(load_dir), peers or Alone()
    candidates = peers.tell(lambda: _list_or_error(load_dir))
    if isinstance(candidates, str):
        raise CheckpointError(f"--load {load_dir}: {candidates}")
    if wanted_step is not None:
        return _choose_step(load_dir, wanted_step, candidates, peers, is_thorough)
    skipped = []
    for name in candidates:
        reason = find_fault(load_dir / name, peers, is_thorough)
        if reason is None:
            looked_at = {one for one, _ in skipped}
            for other in peers.tell(lambda: list_unfinished(load_dir)):
                if other not in looked_at and name != RELEASE and _number(other) > _number(name):
                    skipped.append((other, _INTERRUPTED))
            told = tuple(f"{load_dir}: {one} is skipped: {why}" for one, why in skipped)
            return _choice(load_dir, name, told)
        skipped.append((name, reason))
    has_tracker = peers.tell((load_dir / TRACKER).exists)
    unfinished = peers.tell(lambda: list_unfinished(load_dir))
    if skipped and not has_tracker and {name for name, _ in skipped} <= set(unfinished):
        return None  # the run died in its first save: there is nothing to go on from
    if skipped:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3])
        more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        raise CheckpointError(f"{load_dir} has no intact checkpoint: {reasons}{more}; {_REMEDY}")
    if has_tracker:
        raise CheckpointError(
            f"{load_dir} has {TRACKER}, but no checkpoint; remove that file to start from scratch"
        )
    return None


def _choose_step(
    load_dir: Path, step: int, candidates: list[str], peers: Peers, is_thorough: bool
) -> Choice:
    name = f"iter_{step:07d}"
    is_there = name in candidates
    reason = "there is no such directory"
    if is_there:
        reason = find_fault(load_dir / name, peers, is_thorough)
    if reason is None:
        return _choice(load_dir, name, ())
    for other in candidates:
        if other not in (name, RELEASE) and find_fault(load_dir / other, peers) is None:
            remedy = f"the newest intact one is --ckpt-step {_number(other)}"
            break
    else:
        remedy = "and there is no intact one"
    raise CheckpointError(f"--ckpt-step {step}: {load_dir / name}: {reason}; {remedy}")


def _list_or_error(load_dir: Path) -> list[str] | str:
    try:
        return list_candidates(load_dir)
    except OSError as error:
        return error.strerror or one_line(error)


def _choice(load_dir: Path, name: str, told: tuple[str, ...]) -> Choice:
    is_release = name == RELEASE
    return Choice(0 if is_release else _number(name), is_release, load_dir / name, told)


def find_fault(iteration_dir: Path, peers: Peers, is_thorough: bool = True) -> str | None:
    """The first thing that is wrong with a checkpoint, its data included; None where it is intact.
    Each rank reads a share of the data files."""
    contents = peers.tell(lambda: _contents_or_reason(iteration_dir))
    if isinstance(contents, str):
        return contents
    mine = list(contents.files)[peers.rank :: peers.size]
    reasons = peers.gather(find_corruption(iteration_dir, contents.files, mine, is_thorough))
    return next((reason for reason in reasons if reason is not None), None)


def _contents_or_reason(iteration_dir: Path) -> Contents | str:
    try:
        return read_contents(iteration_dir)
    except Damage as damage:
        return str(damage)


def repair_tracker(load_dir: Path | str, choice: Choice) -> str | None:
    """Make the tracker name the chosen checkpoint, for tools that believe it. Returns a line for
    the user where it did not; a directory that is not writable is left as it is."""
    load_dir = Path(load_dir)
    if read_tracker(load_dir) == choice.folder.name:
        return None
    try:
        replace_file(load_dir / TRACKER, choice.tracker_text)
    except OSError as error:
        told = f"{TRACKER} does not name {choice.folder.name}, and stays so"
        return f"{load_dir}: {told}: {error.strerror}"
    return f"{load_dir}: {TRACKER} now names {choice.folder.name}"
