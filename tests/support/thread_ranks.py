# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of this process, for exchanges alone."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch

from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology

_MEET_S = 20.0


class _Done:
    """The handle of a collective that is complete."""

    def wait(self, *unused: Any) -> bool:
        return True


class _Meetings:
    """torch.distributed.all_to_all_single between threads: a group is a tuple of ranks."""

    def __init__(self):
        self.rank = threading.local()
        self._lock = threading.Lock()
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._sent: dict[tuple, tuple[torch.Tensor, ...]] = {}

    def all_to_all_single(self, received, sent, received_splits, sent_splits, group, async_op):
        assert async_op
        with self._lock:
            barrier = self._barriers.setdefault(group, threading.Barrier(len(group)))
        self._sent[group, self.rank.value] = sent.split(sent_splits)
        barrier.wait(_MEET_S)
        place = group.index(self.rank.value)
        for part, source in zip(received.split(received_splits), group, strict=True):
            part.copy_(self._sent[group, source][place])  # fails where the two disagree
        barrier.wait(_MEET_S)
        return _Done()


def on_threads(fn: Callable[[ShardGroups], Any], world_size: int, sizes: Sequence[int]) -> list:
    """Call `fn` with the groups of each rank of a world, all at the same time; its results."""
    meetings, everyone = _Meetings(), list(range(world_size))

    def run(rank: int) -> Any:
        meetings.rank.value = rank
        topology = ShardTopology(world_size, rank, ShardSizes(*sizes))
        return fn(ShardGroups.of_topology(topology, everyone, lambda _, ranks: ranks))

    with (
        mock.patch("torch.distributed.all_to_all_single", meetings.all_to_all_single),
        ThreadPoolExecutor(world_size) as pool,
    ):
        return list(pool.map(run, everyone))
