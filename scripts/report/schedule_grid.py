# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the records of bench_schedules.py into one table per cluster."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.report.records import RecordsError, split

COMPUTE, COMMUNICATION = "compute only", "communication only"
COLUMNS = ("late, blocks", "late, halves", "early, blocks", "early, halves")
_NAMES = {
    "hsdp": "HSDP",
    "hsdp kept": "HSDP, params kept",
    "fsdp2": "FSDP2",
    "fsdp2 kept": "FSDP2, params kept",
    "ddp": "DDP",
}


@dataclass(frozen=True)
class Cell:
    """One contender on one cluster: the slowest rank's median, and extremes of repetitions."""

    median_ms: float
    min_ms: float
    max_ms: float
    volume: float


@dataclass(frozen=True)
class Grid:
    """One cluster.

    `systems`: system -> column -> cell; `runs`: how often it was measured; `foreign`: the largest
    share of the machine that others used in a run.
    """

    name: str
    runs: int
    steps: int
    foreign: float
    compute: Cell
    communication: Cell
    systems: dict[str, dict[str, Cell]]

    @property
    def floor_ms(self) -> float:
        """The longer of computing and communicating alone: no step can be shorter."""
        return max(self.compute.median_ms, self.communication.median_ms)

    def ratio(self, system: str, column: str) -> float:
        return self.systems[system][column].median_ms / self.floor_ms


def grids(lines: Sequence[dict]) -> list[Grid]:
    """One for each cluster, in the order of the records. Raises RecordsError."""
    clusters: dict[tuple, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for line in split(lines).lines:
        model = line["model"]
        key = line["nodes"], line["ranks_per_node"], line["profile"]["name"], model["block_ms"]
        clusters[key][line["contender"]].append(line)
    return [_grid(*key, by_contender) for key, by_contender in clusters.items()]  # pyright: ignore[reportCallIssue]


def _grid(
    nodes: int, ranks: int, network: str, block_ms: float, by_contender: dict[str, list[dict]]
) -> Grid:
    cells = {name: _cell(lines) for name, lines in by_contender.items()}
    if absent := {COMPUTE, COMMUNICATION} - set(cells):
        raise RecordsError(f"{min(absent)!r} was not measured on {network}")
    some = by_contender[COMPUTE]
    systems: dict[str, dict[str, Cell]] = defaultdict(dict)
    for name, cell in cells.items():
        if name not in (COMPUTE, COMMUNICATION):
            system, column = _place(name)
            systems[system][column] = cell
    return Grid(
        f"{nodes} nodes x {ranks} ranks, {network}, {block_ms:g} ms a block",
        len(some),
        some[0]["repetitions"] * some[0]["steps"],
        max(line["foreign_cpu"] for line in some),
        cells[COMPUTE],
        cells[COMMUNICATION],
        dict(systems),
    )


def _cell(lines: Sequence[dict]) -> Cell:
    times = [ms for line in lines for ms in line["step_ms"]]
    median_ms = statistics.median(line["median_ms"] for line in lines)
    return Cell(median_ms, min(times), max(times), lines[0]["volume"])


def _place(contender: str) -> tuple[str, str]:
    """System and column of a contender's name, such as "threaded, halves, early update"."""
    system, *variant = contender.split(", ")
    update = "early" if "early update" in variant else "late"
    units = "halves" if "halves" in variant else "blocks"
    return _NAMES.get(system, system), f"{update}, {units}"


def markdown(lines: Sequence[dict]) -> str:
    return "\n\n".join(_table(grid) for grid in grids(lines))


def _table(grid: Grid) -> str:
    rows = [
        f"### {grid.name}",
        "",
        f"Computing alone takes {_spread(grid.compute)} ms, communicating alone "
        f"{_spread(grid.communication)} ms: the floor is {grid.floor_ms:.0f} ms. "
        f"{grid.runs} {'run' if grid.runs == 1 else 'runs'} of {grid.steps} steps of each "
        f"contender; others used at most {grid.foreign:.0%} of the machine. Each cell: the step "
        "over the floor, then its milliseconds.",
        "",
        f"| system | {' | '.join(COLUMNS)} | sent by a node / P |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for system, cells in grid.systems.items():
        columns = [
            f"**{grid.ratio(system, column):.2f}**, {_spread(cells[column])}"
            if column in cells
            else ""
            for column in COLUMNS
        ]
        volume = next(iter(cells.values())).volume
        rows.append(f"| {system} | {' | '.join(columns)} | {volume:.3f} |")
    return "\n".join(rows)


def _spread(cell: Cell) -> str:
    return f"{cell.median_ms:.0f} ({cell.min_ms:.0f} to {cell.max_ms:.0f})"
