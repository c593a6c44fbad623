# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what ranks launched, out of dumps of torch's flight recorder for NCCL, and which of it are
one operation of several ranks.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """group: name of a process group, the same on its ranks; ranks: those that meet, of the world,
    or sender and receiver; sizes: of the inputs."""

    group: str
    ranks: tuple[int, ...]
    operation: str
    sizes: str

    @property
    def is_message(self) -> bool:
        return self.operation in ("send", "recv")


class Meeting(NamedTuple):
    """One operation in which ranks wait for each other: the index-th of its kind in its group."""

    group: str
    ranks: tuple[int, ...]
    is_message: bool
    index: int

    def __str__(self) -> str:
        what = "message {} -> {}".format(*self.ranks) if self.is_message else "collective"
        where = "" if self.is_message else f" of ranks {' '.join(map(str, self.ranks))}"
        return f"{what} number {self.index} of group {self.group}{where}"


def launches_in(dump: dict[str, Any], num_last: int | None = None) -> list[Launch]:
    """The launches of one rank, in their order.

    dump: what torch's `_dump_nccl_trace` pickles, and a run that timed out writes.
    num_last: only so many, the newest.
    """
    entries = dump.get("entries", [])
    if num_last is not None:
        entries = entries[len(entries) - num_last :]
    ranks = {
        name: tuple(map(int, group["ranks"].strip("[]").split(",")))
        for name, group in dump["pg_config"].items()
    }
    return [_launch(entry, ranks) for entry in entries]


def num_recorded(dump: dict[str, Any]) -> int:
    """How many launches torch has recorded so far, those that it no longer keeps included."""
    entries = dump.get("entries", [])
    return entries[-1]["record_id"] + 1 if entries else 0


def _launch(entry: dict[str, Any], ranks: dict[str, tuple[int, ...]]) -> Launch:
    group = entry["process_group"][0]
    name = entry["profiling_name"].removeprefix("nccl:")
    sizes = str(entry["input_sizes"])
    if not entry["is_p2p"]:
        return Launch(group, ranks[group], name, sizes)
    kind, pair = name.split()  # "send 0->1" or "recv 1<-0", ranks of the group
    own, other = (ranks[group][int(rank)] for rank in pair.replace("<-", "->").split("->"))
    return Launch(group, (own, other) if kind == "send" else (other, own), kind, sizes)


def meetings_of(launches: Sequence[Launch]) -> list[Meeting]:
    """A rank's launches, so that what ranks do together is equal on all of them."""
    seen: Counter[tuple] = Counter()
    meetings = []
    for launch in launches:
        key = launch.group, launch.ranks, launch.is_message
        meetings.append(Meeting(*key, seen[key]))
        seen[key] += 1
    return meetings


def unmet_of(orders: Sequence[Sequence[Meeting]]) -> list[Meeting]:
    """Meetings that one of their ranks does not come to. orders: by rank of the world."""
    came: dict[Meeting, set[int]] = {}
    for rank, order in enumerate(orders):
        for meeting in order:
            came.setdefault(meeting, set()).add(rank)
    return [meeting for meeting, ranks in came.items() if ranks != set(meeting.ranks)]
