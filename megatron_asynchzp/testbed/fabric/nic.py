# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the modelled clocks of the network cards: when a message has left and when it arrives."""

import fcntl
import mmap
import os
import struct
import threading
import time

from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_asynchzp.testbed.profile import NetworkProfile

_CLOCK = struct.Struct("d")
_MAX_NODES = 1024
_BOARD_KEY = "asynchzp_fabric_clocks"


class NicClocks:
    """The times until which each node's cards are busy, shared by all ranks of a run.

        node 0  up | down | loop    node 1  up | down | loop   ...    one double each, monotonic s

    A message from a to b occupies a's up and b's down for its length (within a node: its loop),
    first come, first served. CLOCK_MONOTONIC is one clock for the whole machine.

    file: descriptor of a file of at least _nbytes() zeros, which becomes the object's own.
    """

    def __init__(self, profile: NetworkProfile, file: int):
        self._profile = profile
        self._file = file
        self._clocks = mmap.mmap(file, _nbytes())
        self._mutex = threading.Lock()  # a file lock excludes other processes, not threads

    @classmethod
    def shared(cls, profile: NetworkProfile, store: Store) -> "NicClocks":
        """The clocks of the run that meets at `store`.

        They live in a memory file without a name, which the first rank makes and the others open
        through its process: nothing is left behind, however the ranks end.
        """
        while isinstance(store, PrefixStore):  # one board for all groups
            store = store.underlying_store
        if store.add(f"{_BOARD_KEY}_makers", 1) == 1:
            file = os.memfd_create(_BOARD_KEY)
            os.ftruncate(file, _nbytes())
            store.set(_BOARD_KEY, f"/proc/{os.getpid()}/fd/{file}")
        else:
            file = os.open(store.get(_BOARD_KEY).decode(), os.O_RDWR)
        return cls(profile, file)

    def reserve(self, source_node: int, destination_node: int, nbytes: int) -> tuple[float, float]:
        """Occupy the cards for a message that is ready now: when it has left, when it arrives."""
        is_inter = source_node != destination_node
        duration_s = nbytes * 8e-9 / self._profile.gbit(is_inter)
        left = time.monotonic()
        if duration_s > 0:
            if is_inter:
                cards = (3 * source_node, 3 * destination_node + 1)
            else:
                cards = (3 * source_node + 2,)
            left = self._occupy(cards, left, duration_s)
        return left, left + self._profile.latency_s(is_inter)

    def _occupy(self, cards: tuple[int, ...], now: float, duration_s: float) -> float:
        with self._mutex:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                offsets = [card * _CLOCK.size for card in cards]
                begin = max(now, *(_CLOCK.unpack_from(self._clocks, o)[0] for o in offsets))
                for offset in offsets:
                    _CLOCK.pack_into(self._clocks, offset, begin + duration_s)
                return begin + duration_s
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


def sleep_until(moment: float) -> None:
    """Return at `moment` of the monotonic clock, or at once where it has passed."""
    if (left_s := moment - time.monotonic()) > 0:
        time.sleep(left_s)


def _nbytes() -> int:
    return 3 * _MAX_NODES * _CLOCK.size
