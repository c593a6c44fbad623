# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a cell of the table of faults is: which fault strikes which world at which moment."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

FAULTS = {
    "link down": "the link of a node loses its carrier",
    "upload lost": "what a node sends is lost, what it is sent arrives",
    "download lost": "what a node is sent is lost, what it sends arrives",
    "link at 1%": "the link of a node has 1% of its rate, for as long as the limit",
    "rank killed": "SIGKILL of a rank; the kernel closes its connections",
    "node killed": "a node without power: silence, and none of its ranks is left",
    "first node killed": "the same of the node where the ranks meet",
    "rank stopped": "SIGSTOP of a rank for longer than the limit, then SIGCONT",
}
LAST_STEP, SAVE_EVERY = 8, 3
"""Of every run; a moment comes after the first checkpoint."""
MOMENTS = ("gather", "reduce", "grad-sync", "param-sync", "optimizer", "save", "load")
_ON_LINKS = ("link down", "upload lost", "download lost", "link at 1%")
_KILLS = ("rank killed", "node killed", "first node killed")

# Each unit visits a collective's moment once a micro-batch or step; a few steps' worth.
_MOST_VISITS = {"gather": 40, "reduce": 30, "grad-sync": 15, "param-sync": 15, "optimizer": 3}
# Nodes, ranks of each, and P, G, O.
_WORLDS = [
    (2, 2, (2, 2, 4)),
    (2, 2, (2, 2, 2)),
    (2, 2, (4, 4, 4)),
    (4, 1, (2, 2, 4)),
    (4, 1, (4, 4, 4)),
    (4, 1, (1, 2, 4)),
]
_SCHEDULES = ("threaded", "threaded", "main-thread", "inline")


@dataclass(frozen=True)
class Cell:
    """One fault at one moment of one run.

    `fault`, `moment`: see above; `nodes`, `ranks`: of each; `sizes`: P, G, O; `victim`: the fault
    strikes at this rank's moment, on its node; `visit`: the how manieth visit of the moment after
    the first checkpoint; `program`: "library" or "megatron".
    """

    fault: str
    moment: str
    nodes: int
    ranks: int
    sizes: tuple[int, int, int]
    schedule: str
    victim: int
    visit: int
    program: str = "library"

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    @property
    def node(self) -> int:
        """On which the fault strikes."""
        return self.victim // self.ranks

    @property
    def is_on_link(self) -> bool:
        return self.fault in _ON_LINKS

    @property
    def dead(self) -> list[int]:
        """Ranks that cannot speak any more."""
        if self.fault == "rank killed":
            return [self.victim]
        first = self.node * self.ranks
        return list(range(first, first + self.ranks)) if self.fault in _KILLS else []

    @property
    def silent(self) -> list[int]:
        """Ranks that do not answer in the store where the ranks met."""
        if self.fault == "rank stopped":
            return [self.victim]
        if self.dead or self.fault == "link at 1%":
            return self.dead
        cut_off = [rank for rank in range(self.world_size) if rank // self.ranks == self.node]
        return [rank for rank in range(self.world_size) if (rank in cut_off) == (self.node > 0)]

    def hears_store(self, rank: int) -> bool:
        """Return whether `rank` can talk to the process that holds the store after the fault."""
        is_of_rank = self.program == "library"
        if self.fault == "first node killed" or (is_of_rank and 0 in (*self.dead, *self.silent)):
            return False
        is_cut = self.is_on_link and self.fault != "link at 1%"
        on_node = rank // self.ranks == self.node
        return not is_cut or on_node == (self.node == 0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def draw_cells(seed: int, repeats: int, program: str = "library") -> Iterator[Cell]:
    """Every fault at every moment `repeats` times, of random worlds, ranks and visits."""
    numbers = random.Random(seed)
    for _ in range(repeats):
        for fault in FAULTS:
            for moment in MOMENTS:
                yield _draw(numbers, fault, moment, program)


def _draw(numbers: random.Random, fault: str, moment: str, program: str) -> Cell:
    worlds = [one for one in _WORLDS if _has_moment(*one[2], moment)]
    nodes, ranks, sizes = numbers.choice(worlds)
    if program == "megatron":
        nodes, ranks = 2, 2
    if fault == "first node killed":
        victim = numbers.randrange(ranks)
    elif fault == "node killed":
        victim = numbers.randrange(ranks, nodes * ranks)
    else:
        victim = numbers.randrange(nodes * ranks)
    visit = numbers.randint(1, _MOST_VISITS.get(moment, 1))
    schedule = numbers.choice(_SCHEDULES)
    return Cell(fault, moment, nodes, ranks, sizes, schedule, victim, visit, program)


def _has_moment(param: int, grad: int, states: int, moment: str) -> bool:
    """Whether there is such a collective with these sizes."""
    asked = {"gather": param > 1, "reduce": grad > 1}
    asked |= {"grad-sync": states > grad, "param-sync": states > param}
    return asked.get(moment, True)
