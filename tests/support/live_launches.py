# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The collectives and messages that this rank launches on NCCL, by torch's flight recorder, and
which launches of several ranks are one operation."""

import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

BUFFER_SIZE = 4000  # launches of a process that torch keeps, the newest
ENV = {"TORCH_FR_BUFFER_SIZE": str(BUFFER_SIZE)}


class Launch(NamedTuple):
    """group: a name, the same on all its ranks; ranks: of the world, those that meet, or sender and
    receiver; sizes: of the inputs."""

    group: str
    ranks: tuple[int, ...]
    operation: str
    sizes: str

    @property
    def is_message(self) -> bool:
        return self.operation in ("send", "recv")


class Meeting(NamedTuple):
    """An operation in which ranks wait for each other: the index-th of its kind in its group."""

    group: str
    ranks: tuple[int, ...]
    is_message: bool
    index: int


class LaunchRecord:
    """The launches of this rank since it was made, or since they were last taken."""

    def __init__(self) -> None:
        self._num_taken = _num_recorded(_dump())

    def take(self) -> list[Launch]:
        dump = _dump()
        count = _num_recorded(dump) - self._num_taken
        assert count < BUFFER_SIZE, "more launches than torch keeps"
        self._num_taken += count
        return _newest(dump, count)


def meetings_of(launches: Sequence[Launch]) -> list[Meeting]:
    """A rank's launches, so that an operation is equal on all of its ranks."""
    seen: Counter[tuple] = Counter()
    meetings = []
    for launch in launches:
        key = launch.group, launch.ranks, launch.is_message
        meetings.append(Meeting(*key, seen[key]))
        seen[key] += 1
    return meetings


def stuck_in(orders: Sequence[Sequence[Meeting]]) -> list[Meeting]:
    """The meetings before which ranks stand when each rank launches one operation at a time, as a
    device with one hardware queue does: none when all ranks come to the end of their order."""
    places = [0] * len(orders)
    has_moved = True
    while has_moved:
        has_moved = False
        for order, place in zip(orders, list(places), strict=True):
            if place < len(order) and _is_next_of_all(order[place], orders, places):
                for rank in order[place].ranks:
                    places[rank] += 1
                has_moved = True
                break
    pairs = zip(orders, places, strict=True)
    return [order[place] for order, place in pairs if place < len(order)]


def _is_next_of_all(
    meeting: Meeting, orders: Sequence[Sequence[Meeting]], places: Sequence[int]
) -> bool:
    nexts = (orders[rank][places[rank] : places[rank] + 1] for rank in meeting.ranks)
    return all(list(following) == [meeting] for following in nexts)


def _dump() -> dict[str, Any]:
    return pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())  # pyright: ignore


def _num_recorded(dump: dict[str, Any]) -> int:
    """How many launches torch has recorded so far, those that it no longer keeps included."""
    entries = dump.get("entries", [])
    return entries[-1]["record_id"] + 1 if entries else 0


def _newest(dump: dict[str, Any], count: int) -> list[Launch]:
    entries = dump.get("entries", [])
    ranks = {
        name: tuple(map(int, group["ranks"].strip("[]").split(",")))
        for name, group in dump["pg_config"].items()
    }
    return [_launch(entry, ranks) for entry in entries[len(entries) - count :]]


def _launch(entry: dict[str, Any], ranks: dict[str, tuple[int, ...]]) -> Launch:
    group = entry["process_group"][0]
    name = entry["profiling_name"].removeprefix("nccl:")
    sizes = str(entry["input_sizes"])
    if not entry["is_p2p"]:
        return Launch(group, ranks[group], name, sizes)
    kind, pair = name.split()  # "send 0->1" or "recv 1<-0", ranks of the group
    own, peer = (ranks[group][int(rank)] for rank in pair.replace("<-", "->").split("->"))
    return Launch(group, (own, peer) if kind == "send" else (peer, own), kind, sizes)
