# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Finds out whether ranks whose tasks stand still wait for each other for ever.

[Note: apart] Ranks that run one program submit tasks in one order. So the records of two ranks,
noted at any time, agree in all common entries, and a slow rank has the shorter record. Ranks run
different programs if

- their records differ in an entry, or
- the rank with the shorter record has closed, or
- it waits in a collective of torch.distributed that the other rank, further on, has not called.

No time limit is involved, so a slow peer is never mistaken for one with another program.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from megatron_asynchzp.engine.failure.other_collective import num_called

LENGTH = 256
"""Entries that a record keeps: more than a host runs ahead of others."""
_REMEDY = "call the model alike on every rank, in evaluations and generation too"

Record = Sequence[tuple[int, str]]
"""The latest tasks that a rank submitted, each with its number."""


class Progress(NamedTuple):
    """The progress of a rank, as it tells others."""

    tasks: Record  # all of its tasks
    crossing: Record  # tasks that cross groups of ranks in step
    calls: Mapping[str, int]  # collectives by process group, see calls_of_main_thread
    is_closed: bool
    doing: str  # in words

    def to_text(self) -> str:
        return json.dumps(self)

    @classmethod
    def of_text(cls, text: str) -> "Progress":
        return cls(*json.loads(text))


class ObservedDriver(Protocol):
    """The part of a rank's driver that the thread of a roll call reads."""

    @property
    def counts(self) -> Mapping[str, int]: ...  # submitted tasks by lane; all ranks have the lanes
    @property
    def compared(self) -> Mapping[int, bool]: ...  # comparable ranks: whether they are in step
    def fail_with_others(self, why: str = "") -> None: ...  # called once, with a caller's reason
    def is_writing(self) -> bool: ...  # a checkpoint that others may wait for
    def stalled_s(self) -> float: ...
    def progress(self, is_closed: bool = False) -> Progress: ...


def why_apart(rank: int, own: Progress, peer: int, peers: Progress, in_step: bool) -> str:
    """Describe why this rank and `peer` would wait for ever; "" if they would not."""
    records = (own.tasks, peers.tasks) if in_step else (own.crossing, peers.crossing)
    mine, theirs = map(dict[int, str], records)
    different = [
        number for number in sorted(mine.keys() & theirs.keys()) if mine[number] != theirs[number]
    ]
    num_mine, num_theirs = max(mine, default=0), max(theirs, default=0)
    if different:
        first = different[0]
        how = f"number {first} is '{mine[first]}' on the first and '{theirs[first]}' on the second"
    elif num_mine > num_theirs and (peers.is_closed or _has_called_more(peers)):
        how = f"the first has called {num_mine} and the second {num_theirs}"
    else:
        return ""
    return (
        f"ranks called different modules, or different numbers of forwards: rank {rank} "
        f"{own.doing}; rank {peer} {peers.doing}; of the model's collectives {how}; {_REMEDY}"
    )


def _has_called_more(peers: Progress) -> bool:
    """Return whether a peer has called torch.distributed collectives that this rank has not."""
    own = {name: num_called(name) for name in peers.calls}
    return any(peers.calls[name] > called for name, called in own.items() if called is not None)
