# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The order in which a pipeline stage uses the units of its chunks, from Megatron's own table, and
the most that a cache can save there: a flow, solved by networkx.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import networkx
from megatron.core.pipeline_parallel.schedules import get_schedule_table

Use = tuple[int, int]  # chunk, unit


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline: vpp chunks of `layers` units each, in 1F1B order, interleaved where
    vpp is over 1. recomputes: backward of a unit begins with a second forward."""

    pp: int
    vpp: int
    micro_batches: int
    rank: int = 0
    layers: int = 2
    recomputes: bool = False

    def _phases(self) -> list[tuple[str, int]]:
        """("F" or "B", chunk) in order."""
        if self.vpp == 1:
            chunks = [0] * self.micro_batches
            warm_up = self.pp - self.rank - 1
        else:
            table = get_schedule_table(self.micro_batches, self.vpp, self.pp)
            chunks = [chunk for _, chunk in table]
            warm_up = 2 * (self.pp - self.rank - 1) + (self.vpp - 1) * self.pp
        total = len(chunks)
        warm_up = min(warm_up, total)
        phases = [("F", chunk) for chunk in chunks[:warm_up]]
        for index in range(total):
            if index + warm_up < total:
                phases.append(("F", chunks[index + warm_up]))
            phases.append(("B", self.vpp - 1 - chunks[index]))
        return phases

    def turns(self) -> list[tuple[str, Use]]:
        """("F" or "B", whose turn it is) in order."""
        turns: list[tuple[str, Use]] = []
        for phase, chunk in self._phases():
            units = [(chunk, layer) for layer in range(self.layers)]
            if phase == "F":
                turns += [("F", unit) for unit in units]
                continue
            for unit in reversed(units):
                turns += [("F", unit)] * self.recomputes + [("B", unit)]
        return turns

    def param_uses(self) -> list[Use]:
        """Whose parameters are used, in order."""
        return [unit for _, unit in self.turns()]

    def grad_uses(self) -> list[Use]:
        """Whose gradients are complete, in order."""
        backwards = [chunk for phase, chunk in self._phases() if phase == "B"]
        return [(chunk, layer) for chunk in backwards for layer in reversed(range(self.layers))]


def most_kept_gaps(uses: Sequence[Use], room: int, counts_own: bool = False) -> int:
    """The most gaps between two uses of one unit during which it can be kept, where `room` units
    fit: beside the one whose turn it is, or with it where it was kept (counts_own)."""
    graph = networkx.DiGraph()
    graph.add_node(0, demand=-room)
    graph.add_node(len(uses), demand=room)
    for position in range(len(uses)):
        graph.add_edge(position, position + 1, capacity=room, weight=0)
    last: dict[Use, int] = {}
    free = 0
    for position, user in enumerate(uses):
        start = last.get(user)
        last[user] = position
        if start is None:
            continue
        if start + 1 == position and not counts_own:
            free += 1
            continue
        gap = f"gap {start}"  # a node of its own: two gaps may have the same ends
        graph.add_edge(start + 1, gap, capacity=1, weight=-1)
        graph.add_edge(gap, position + counts_own, capacity=1, weight=0)
    if room == 0 or not uses:
        return free
    cost, _ = networkx.network_simplex(graph)
    return free - cost
