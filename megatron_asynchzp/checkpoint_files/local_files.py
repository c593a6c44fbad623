# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the files of local checkpoints on one node, as nvidia-resiliency-ext lays them out.

A rank's folder holds its own shard and the copies that it keeps for others, one archive each.

    LOCAL_DIR/0/iter_0000012_0_local.pt   rank 0's shard, on the node of rank 0
    LOCAL_DIR/0/iter_0000012_2_local.pt   a copy of rank 2's, which is on another node
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_asynchzp.checkpoint_files.archive import check_records, read_archives
from megatron_asynchzp.checkpoint_files.errors import Damage, one_line

_NAME = re.compile(r"iter_(\d{7})_(\d+)_local\.pt")
# What an interrupted save leaves. The library's next save of that iteration ends at it.
_UNFINISHED = "iter_*_local.dirty.pt"


class LocalFile(NamedTuple):
    """The shard of `rank` after `iteration`."""

    path: Path
    iteration: int
    rank: int


class NodeFolder(NamedTuple):
    """Folder of a rank's local checkpoints."""

    folder: Path
    rank: int
    first: int  # the first rank on its node
    on_node: int  # number of ranks on a node

    def files(self) -> list[LocalFile]:
        return _files_in(self.folder)


def _files_in(folder: Path) -> list[LocalFile]:
    names = ((path, _NAME.fullmatch(path.name)) for path in sorted(folder.glob("iter_*_local.pt")))
    return [LocalFile(path, int(name[1]), int(name[2])) for path, name in names if name]


def adopt(place: NodeFolder, has_own: Sequence[bool]) -> None:
    """Move shards from folders of ranks on other nodes that have no files there.

    torchrun numbers nodes anew when one is replaced, and the library searches one folder alone. A
    copy goes to the rank with the same place on its node as the owner, because these two exchange
    copies. `has_own`: by rank, whether its folder has files. Raises OSError.
    """
    here = range(place.first, place.first + place.on_node)
    for folder in place.folder.parent.glob("[0-9]*"):
        number = int(folder.name) if folder.name.isdecimal() else place.rank
        if number in here or (number < len(has_own) and has_own[number]):
            continue
        for path, _, owner in _files_in(folder):
            if owner % place.on_node == place.rank - place.first:
                place.folder.mkdir(parents=True, exist_ok=True)
                path.replace(place.folder / path.name)


def remove_damaged(place: NodeFolder) -> list[str]:
    """Remove unloadable files from the rank's folder; return a line for each, to be logged.

    Reads every byte. Raises OSError.
    """
    for path in place.folder.glob(_UNFINISHED):
        path.unlink()
    lines = []
    for path, _, _ in place.files():
        try:
            with path.open("rb") as file:
                check_records(file, read_archives(file), lambda record: True)
        except Damage as damage:
            lines.append(f"{path} is removed: {one_line(damage)}")
            path.unlink()
    return lines


def keep_only(place: NodeFolder, iteration: int | None) -> None:
    for path, saved, _ in place.files():
        if saved != iteration:
            path.unlink()


def lacking(
    held: list[list[tuple[int, int]]],  # by rank, the (iteration, owner) pairs that it has
    iteration: int,
    looked_for_at: list[list[int]],  # by rank, the ranks that may have its shard
) -> list[int]:
    """Return the ranks whose shard of `iteration` is at none of the ranks that may have it."""
    return [
        rank
        for rank, places in enumerate(looked_for_at)
        if not any((iteration, rank) in held[place] for place in places)
    ]
