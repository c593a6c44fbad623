# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Lets all ranks of a job examine a folder of checkpoints together, and log the result."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from megatron_asynchzp.checkpoint_files.peers import Peers


class WorldPeers(Peers):
    """All ranks of the job."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, mine: Any) -> list[Any]:
        all_of_them: list[Any] = [None] * self.size
        dist.all_gather_object(all_of_them, mine)
        return all_of_them

    def broadcast(self, mine: Any) -> Any:
        box = [mine]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def peers_of_job() -> Peers:
    return WorldPeers() if dist.is_initialized() else Peers()


def log(lines: Iterable[str | None], peers: Peers) -> None:
    for line in lines:
        if line is not None and peers.rank == 0:
            print(f"megatron_asynchzp: {line}", flush=True)
