# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what surrounds the writing of one checkpoint: a clean directory before, the manifest after.
Collective: rank 0 changes names, all ranks read. Must not know what is written in between.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_asynchzp.checkpoint_files.choice import Alone, Peers
from megatron_asynchzp.checkpoint_files.contents import find_leftovers
from megatron_asynchzp.checkpoint_files.errors import Damage, SaveError, one_line
from megatron_asynchzp.checkpoint_files.inventory import read_inventory
from megatron_asynchzp.checkpoint_files.manifest import seal_file, write_manifest


def prepare_directory(iteration_dir: Path | str, peers: Peers | None = None) -> None:
    """Remove what an interrupted or an older save left in the directory, if it is there.

    What makes it look complete goes first, so that a crash in between leaves something that does
    not. Raises SaveError, on all ranks.
    """
    _on_rank_0(lambda: _remove_leftovers(Path(iteration_dir)), iteration_dir, peers or Alone())


def complete_directory(
    iteration_dir: Path | str,
    peers: Peers | None = None,
    amend: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write the manifest, when all data is on disk and before anything names the checkpoint as
    the latest. Raises SaveError, on all ranks.

    amend: called on rank 0 before, for what is to be changed in the directory.
    """
    iteration_dir, peers = Path(iteration_dir), peers or Alone()

    def list_items() -> dict[str, Any]:
        amend(iteration_dir)
        return read_inventory(iteration_dir, is_trusted=True).files

    items_of = _on_rank_0(list_items, iteration_dir, peers)
    try:
        names = list(items_of)[peers.rank :: peers.size]
        mine: Any = {name: seal_file(iteration_dir / name, items_of[name]) for name in names}
    except (OSError, Damage) as error:
        mine = error
    gathered = peers.gather(mine)
    for seals in gathered:
        if isinstance(seals, Exception):
            raise save_error(iteration_dir, one_line(seals))
    seals = {name: seal for one in gathered for name, seal in one.items()}
    _on_rank_0(lambda: write_manifest(iteration_dir, seals), iteration_dir, peers)


def save_error(iteration_dir: Path | str, reason: str) -> SaveError:
    return SaveError(
        f"{Path(iteration_dir)} could not be saved: {reason}; earlier checkpoints are as they were"
    )


def _remove_leftovers(iteration_dir: Path) -> None:
    if iteration_dir.is_dir():
        for path in find_leftovers(iteration_dir):
            path.unlink(missing_ok=True)


def _on_rank_0(act: Callable[[], Any], iteration_dir: Path | str, peers: Peers) -> Any:
    result = peers.tell(lambda: _result_or_error(act))
    if isinstance(result, Exception):
        raise save_error(iteration_dir, one_line(result))
    return result


def _result_or_error(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except (OSError, Damage) as error:
        return error
