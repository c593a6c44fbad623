# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how ranks whose tasks stand still find out that they would wait for each other for ever.

[Note: apart] Ranks that run one program submit tasks in one order. So the records of two of them,
whenever each was noted, agree where both have an entry, and a slow rank has the shorter record.
Ranks run different programs where

- their records differ at one place, or
- the one with the shorter record has closed, or
- it waits in a collective of torch.distributed that the other, further on, has not called.

No time decides it: a peer that is only slow is never taken for one that went another way.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from megatron_asynchzp.failure.other_collective import num_called

LENGTH = 256
"""Entries of a record that are kept: more than a host runs ahead of the others by."""
_REMEDY = "call the model alike on every rank, in evaluations and generation too"

Record = Sequence[tuple[int, str]]
"""The latest tasks that a rank submitted: of each its number and its name."""


class Progress(NamedTuple):
    """Progress of a rank, as it tells the others.

    tasks: of all that it submitted; crossing: of what crosses groups of ranks in step.
    calls: by name of a process group in a collective of which the main thread may wait, how many
        collectives this rank has called there.
    doing: in words.
    """

    tasks: Record
    crossing: Record
    calls: Mapping[str, int]
    is_closed: bool
    doing: str

    def to_text(self) -> str:
        """Write it for `of_text`, on another rank."""
        return json.dumps(self)

    @classmethod
    def of_text(cls, text: str) -> "Progress":
        """Read what `to_text` wrote."""
        return cls(*json.loads(text))


class Standstill(Protocol):
    """Driver of a rank, as the thread of a roll call asks it.

    compared: the ranks whose records are comparable, each with whether it computes in step.
    """

    @property
    def compared(self) -> Mapping[int, bool]: ...
    def standing_s(self) -> float: ...
    def progress(self, is_closed: bool = False) -> Progress: ...


def why_apart(rank: int, own: Progress, other_rank: int, other: Progress, in_step: bool) -> str:
    """Say where this rank and another one would wait for ever; "" where they would not."""
    records = (own.tasks, other.tasks) if in_step else (own.crossing, other.crossing)
    mine, theirs = map(dict[int, str], records)
    different = [
        number for number in sorted(mine.keys() & theirs.keys()) if mine[number] != theirs[number]
    ]
    num_mine, num_theirs = max(mine, default=0), max(theirs, default=0)
    if different:
        first = different[0]
        how = f"number {first} is '{mine[first]}' on the first and '{theirs[first]}' on the second"
    elif num_mine > num_theirs and (other.is_closed or _is_awaited(other)):
        how = f"the first has called {num_mine} and the second {num_theirs}"
    else:
        return ""
    return (
        f"ranks called different modules, or different numbers of forwards: rank {rank} "
        f"{own.doing}; rank {other_rank} {other.doing}; of the model's collectives {how}; {_REMEDY}"
    )


def _is_awaited(other: Progress) -> bool:
    """Whether the other rank has called collectives of torch.distributed that this one has not."""
    own = {name: num_called(name) for name in other.calls}
    return any(other.calls[name] > called for name, called in own.items() if called is not None)
