# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the memory in flight on paper: who holds which part of it, and who used it last."""

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from megatron_asynchzp.sharding.in_flight import first_fit, leaves_room

Span = tuple[int, int]
"""Bytes, half-open."""


class Place(NamedTuple):
    """A span of memory in flight, and the actions that used it last."""

    span: Span
    after: tuple[int, ...]


class Places:
    """Who holds which part of the memory in flight, as comm/arena.py decides it."""

    def __init__(self, nbytes: int):
        self._regions: list[Span] = [(0, nbytes)] if nbytes else []
        self._held: list[Span] = []  # sorted
        self._last_users: list[tuple[Span, int]] = []

    def acquire(self, nbytes: int, from_top: bool) -> Place | None:
        """The first free part that is large enough, seen from one end; None without one."""
        start = first_fit(self._regions, self._held, nbytes, from_top)
        if start is None:
            return None
        span = (start, start + nbytes)
        insort(self._held, span)
        users = [one for one in self._last_users if one[0][0] < span[1] and span[0] < one[0][1]]
        return Place(span, tuple(user for _, user in users))

    def leaves_room(
        self, nbytes: int, from_top: bool, beside: Sequence[Span], more: Sequence[tuple[int, bool]]
    ) -> bool:
        """As in comm/arena.py."""
        return leaves_room(self._regions, self._held, nbytes, from_top, beside, more)

    def release(self, span: Span, user: int | None) -> None:
        """It may be written again once the action `user` has ended."""
        self._held.remove(span)
        if user is not None:
            inside = [one for one in self._last_users if one[0][0] < span[0] or one[0][1] > span[1]]
            self._last_users = [*inside, (span, user)]

    def grow(self, nbytes: int) -> None:
        end = self._regions[-1][1] if self._regions else 0
        self._regions.append((end, end + nbytes))
