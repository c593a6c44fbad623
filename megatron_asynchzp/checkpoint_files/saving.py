# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the steps around the writing of a checkpoint: a clean directory before, a manifest after.

Collective: rank 0 changes names, all ranks read.
"""

from collections.abc import Callable
from itertools import count, takewhile
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_asynchzp.checkpoint_files.common_state import COMMON
from megatron_asynchzp.checkpoint_files.errors import Damage, SaveError, one_line
from megatron_asynchzp.checkpoint_files.index import CONFIG, METADATA, items_by_file, pickle_index
from megatron_asynchzp.checkpoint_files.manifest import (
    MANIFEST,
    SealedFile,
    digest_of_places,
    seal_file,
    write_manifest,
)
from megatron_asynchzp.checkpoint_files.peers import Peers, on_each, on_first
from megatron_asynchzp.checkpoint_files.small_files import replace_file, sync

# First what makes the rest look complete: a crash in between leaves something that does not. Each
# kind is gone from the disk before the next one is removed.
_LEFTOVERS = (MANIFEST, CONFIG, METADATA, COMMON, "__*_*.distcp")
_LEFTOVERS += (f"{MANIFEST}*.tmp", f"{METADATA}*.tmp")


def prepare_directory(iteration_dir: Path | str, peers: Peers | None = None) -> None:
    """Remove the files of an interrupted or older save. Raises SaveError, on all ranks."""

    def remove() -> None:
        for pattern in _LEFTOVERS:
            if paths := list(Path(iteration_dir).glob(pattern)):
                for path in paths:
                    path.unlink(missing_ok=True)
                sync(Path(iteration_dir))

    try:
        on_first(peers or Peers(), remove)
    except OSError as error:
        raise save_error(iteration_dir, one_line(error)) from None


def complete_directory(
    iteration_dir: Path | str,
    peers: Peers | None = None,
    amend: Callable[[Metadata], Metadata] = lambda index: index,
) -> None:
    """Write the manifest, after all data is on disk and before the tracker names the checkpoint.

    Args:
        iteration_dir: the checkpoint.
        peers: the ranks that wrote it.
        amend: makes the index to be stored from the written one, on rank 0.

    Raises:
        SaveError: on all ranks.
    """
    iteration_dir, peers = Path(iteration_dir), peers or Peers()
    try:
        # Each rank reads what it wrote itself: nothing has to be told to all of them.
        shares = on_each(peers, lambda: _seal_own(iteration_dir, peers.rank))
        sealed = {file.name: file for share in shares for file in share}
        on_first(peers, lambda: _complete(iteration_dir, amend, sealed))
    except (OSError, Damage) as error:
        raise save_error(iteration_dir, one_line(error)) from None


def _seal_own(iteration_dir: Path, rank: int) -> list[SealedFile]:
    names = (f"__{rank}_{number}.distcp" for number in count())
    paths = takewhile(Path.exists, (iteration_dir / name for name in names))
    return [seal_file(path) for path in paths]


def _complete(
    iteration_dir: Path, amend: Callable[[Metadata], Metadata], sealed: dict[str, SealedFile]
) -> None:
    index = amend(FileSystemReader(iteration_dir).read_metadata())
    replace_file(iteration_dir / METADATA, pickle_index(index))
    files = []
    for name, items in items_by_file(index).items():
        # What no rank has named: the ranks of a save and of its end may be others.
        file = sealed.get(name) or seal_file(iteration_dir / name)
        if file.places != digest_of_places(items):
            raise Damage(f"{name} does not hold what {METADATA} lists")
        files.append(file)
    write_manifest(iteration_dir, files)


def save_error(iteration_dir: Path | str, reason: str) -> SaveError:
    return SaveError(
        f"{iteration_dir} could not be saved: {reason}; earlier checkpoints are as they were"
    )
