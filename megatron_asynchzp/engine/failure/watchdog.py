# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The time limit of work in the streams of a device."""

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from megatron_asynchzp.engine.device import Device

# The thread's pause between looks, as a part of the limit and at most in seconds. A query of an
# event holds up every other thread, and an event that is never queried stays alive.
_LOOKS_PER_LIMIT, _LONGEST_PAUSE_S = 10, 5.0


class Watchdog[Item]:
    """A thread that checks from time to time whether the oldest item of each lane has ended.

    Items of a lane end in order, so a binary search finds the first that has not ended. The thread
    starts with the first item.
    """

    def __init__(
        self,
        device: Device,
        limit_s: float,  # for an item
        on_late: Callable[[Item], None],  # called once, in the thread, with the first late item
        is_closed: threading.Event,  # ends the thread
    ):
        self._device, self._limit_s = device, limit_s
        self._on_late, self._is_closed = on_late, is_closed
        # (has_ended, deadline by time.monotonic, item) in order.
        self._lanes: dict[str, deque[tuple[Callable[[], bool], float, Item]]] = {}
        self._thread: threading.Thread | None = None

    def watch(self, lane: str, has_ended: Callable[[], bool], item: Item) -> None:
        if lane not in self._lanes:
            self._lanes = {**self._lanes, lane: deque()}  # a copy: the thread may iterate over it
        self._lanes[lane].append((has_ended, time.monotonic() + self._limit_s, item))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="asynchzp-limit", daemon=True)
            self._thread.start()

    def query(self) -> bool:
        # Like an event after all items, once it is closed.
        return all(has_ended() for lane in self._lanes.values() for has_ended, _, _ in lane)

    def close(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_PAUSE_S)

    def _look(self) -> None:
        self._device.bind_thread()
        pause_s = min(self._limit_s / _LOOKS_PER_LIMIT, _LONGEST_PAUSE_S)
        while not self._is_closed.wait(pause_s):
            for watched in self._lanes.values():
                late = self._forget_ended(watched)
                if late is not None:
                    self._on_late(late)
                    return

    def _forget_ended(self, lane: deque[tuple[Callable[[], bool], float, Item]]) -> Item | None:
        """Drop the items that have ended; return the oldest other item, if it is late."""

        def is_on_its_way(place: int) -> bool:
            return not lane[place][0]()

        for _ in range(bisect_left(range(len(lane)), True, key=is_on_its_way)):
            lane.popleft()
        if not lane:
            return None
        _, deadline, item = lane[0]
        return item if time.monotonic() > deadline else None
