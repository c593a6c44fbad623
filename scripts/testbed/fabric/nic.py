# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the modelled clocks of the network cards: when a message has left and when it arrives."""

import fcntl
import mmap
import os
import struct
import threading
import time
from itertools import chain

from torch.distributed.distributed_c10d import PrefixStore, Store

from scripts.testbed.profile import NetworkProfile

_MAX_NODES = 1024
_MAX_SPANS = 63
_CALENDAR = struct.Struct(f"d{2 * _MAX_SPANS}d")  # how many spans; begin and end of each
_PACKET_NBYTES = 4096
_NANOSECOND = 1e-9
_BOARD_KEY = "asynchzp_fabric_clocks"

Span = tuple[float, float]
"""Begin and end, in seconds of the monotonic clock."""


class NicClocks:
    """For which times to come each node's cards are taken, shared by all ranks of a run.

        node 0  up | down | loop    node 1  up | down | loop   ...    one calendar each

    A message from a to b takes the first moments that a's up and b's down both have free, in as
    many parts as it needs (within a node: those of its loop). So a card that waits for a busy peer
    serves others meanwhile. A message of one packet passes between those of others.
    CLOCK_MONOTONIC is one clock for the whole machine.

    file: descriptor of a file of at least _nbytes() zeros, which becomes the object's own.
    """

    def __init__(self, profile: NetworkProfile, file: int):
        self._profile = profile
        self._file = file
        self._board = mmap.mmap(file, _nbytes())
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
        if duration_s > 0 and nbytes > _PACKET_NBYTES:
            if is_inter:
                cards = (3 * source_node, 3 * destination_node + 1)
            else:
                cards = (3 * source_node + 2,)
            left = self._occupy(cards, duration_s)
        else:
            left = time.monotonic() + duration_s
        return left, left + self._profile.latency_s(is_inter)

    def _occupy(self, cards: tuple[int, ...], duration_s: float) -> float:
        with self._mutex:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                # Not before the lock: what another rank has dropped as passed would be taken twice.
                now = time.monotonic()
                taken = [self._read(card, now) for card in cards]
                spans = first_free(sorted(chain.from_iterable(taken)), now, duration_s)
                for card, before in zip(cards, taken, strict=True):
                    self._write(card, joined(sorted(before + spans)))
                return spans[-1][1]
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _read(self, card: int, now: float) -> list[Span]:
        """What is taken from `now` on."""
        count, *times = _CALENDAR.unpack_from(self._board, card * _CALENDAR.size)
        times = times[: 2 * int(count)]
        return [span for span in zip(times[::2], times[1::2], strict=True) if span[1] > now]

    def _write(self, card: int, spans: list[Span]) -> None:
        while len(spans) > _MAX_SPANS:
            spans = [(spans[0][0], spans[1][1]), *spans[2:]]  # rather a gap less than a span
        times = list(chain.from_iterable(spans))
        times += [0.0] * (2 * (_MAX_SPANS - len(spans)))
        _CALENDAR.pack_into(self._board, card * _CALENDAR.size, len(spans), *times)


def first_free(taken: list[Span], begin: float, length: float) -> list[Span]:
    """Return the first free spans from `begin` on, `length` together."""
    found: list[Span] = []
    for next_begin, next_end in taken:
        if begin + length <= next_begin + _NANOSECOND:
            break
        if begin < next_begin:
            found.append((begin, next_begin))
            length -= next_begin - begin
        begin = max(begin, next_end)
    return [*found, (begin, begin + length)]


def joined(spans: list[Span]) -> list[Span]:
    """The same moments in as few spans as there can be. spans: sorted."""
    found: list[Span] = []
    for begin, end in spans:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def sleep_until(moment: float) -> None:
    """Return at `moment` of the monotonic clock, or at once where it has passed."""
    if (left_s := moment - time.monotonic()) > 0:
        time.sleep(left_s)


def _nbytes() -> int:
    return 3 * _MAX_NODES * _CALENDAR.size
