# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads compare's records into rows, one per contender and cluster, with the losses checked."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scripts.testbed.cpu_usage import FOREIGN_LIMIT
from scripts.testbed.differences import worst_difference

NO_NETWORK = "unlimited"  # the network that is not modelled
LOSS_TOLERANCE = 1e-5  # relative, of every step, in fp32


@dataclass(frozen=True)
class Row:
    """One contender.

    `is_red`: its losses are not the reference's, so its times are not shown; `reason`: why there is
    no measurement; `step_ms`: timed steps of all repetitions in which others used at most
    FOREIGN_LIMIT of the machine, or of all if there is none; `foreign`: the most that others used
    in these; `bare_ms`: of the same contender without a network; other numbers: medians, None if
    not known.
    """

    name: str
    family: str
    reason: str = ""
    is_red: bool = False
    step_ms: tuple[float, ...] = ()
    bare_ms: float | None = None
    node_mb: float | None = None
    state_mb: float | None = None
    peak_mb: float | None = None
    loss: float | None = None
    foreign: float = 0.0

    @property
    def is_timed(self) -> bool:
        return bool(self.step_ms) and not self.is_red

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def network_ms(self) -> float | None:
        """What the network adds to a step: all else is there without one."""
        return None if self.bare_ms is None else self.median_ms - self.bare_ms


@dataclass(frozen=True)
class Comparison:
    """All rows of one cluster on one network, fastest first, those without times last."""

    nodes: int
    ranks_per_node: int
    profile: dict
    workload: dict
    rows: tuple[Row, ...]

    @property
    def has_network(self) -> bool:
        return self.profile["name"] != NO_NETWORK

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name and row.is_timed), None)

    def best(self, names: str) -> Row | None:
        """The fastest of those whose name begins so: the same system in several settings."""
        return next((row for row in self.rows if row.name.startswith(names) and row.is_timed), None)


def comparisons(records: Iterable[dict]) -> list[Comparison]:
    """One per cluster and network, in the order of the records."""
    studies: dict[tuple, list[dict]] = defaultdict(list)
    for record in records:
        if record["kind"] != "machine":
            key = record["nodes"], record["ranks_per_node"], record["profile"]["name"]
            studies[key].append(record)
    found = [_comparison(of_study) for of_study in studies.values()]
    bare = {(one.nodes, one.ranks_per_node): one for one in found if not one.has_network}
    return [_beside(one, bare.get((one.nodes, one.ranks_per_node))) for one in found]


def _beside(comparison: Comparison, bare: Comparison | None) -> Comparison:
    """With what each row that is in both takes without a network."""
    if bare is None or bare is comparison:
        return comparison
    rows = [
        replace(row, bare_ms=twin.median_ms)
        if row.is_timed and (twin := bare.row(row.name)) is not None
        else row
        for row in comparison.rows
    ]
    return replace(comparison, rows=tuple(rows))


def _comparison(records: Sequence[dict]) -> Comparison:
    first = records[0]
    runs: dict[str, list[dict]] = defaultdict(list)
    for record in records:
        if record["kind"] == "run":
            runs[record["name"]].append(record)
    reference = next(
        (run["losses"] for of_one in runs.values() for run in of_one if not run["reason"]), None
    )
    rows = [row_of(of_one, reference) for of_one in runs.values()]
    rows.sort(key=lambda row: row.median_ms if row.is_timed else float("inf"))
    return Comparison(
        first["nodes"], first["ranks_per_node"], first["profile"], first["workload"], tuple(rows)
    )


def row_of(runs: Sequence[dict], reference: Sequence[float] | None) -> Row:
    """Summarise all repetitions of a contender. reference: the losses to have."""
    first = runs[0]
    done = [run for run in runs if not run["reason"]]
    if not done:
        return Row(first["name"], first["family"], reason=first["reason"])

    quiet = [run for run in done if run["foreign"] <= FOREIGN_LIMIT] or done

    def middle(key: str, scale: float = 1.0) -> float | None:
        values = [run[key] for run in quiet if run.get(key) is not None]
        return scale * statistics.median(values) if values else None

    return Row(
        name=first["name"],
        family=first["family"],
        is_red=not all(losses_agree(run["losses"], reference) for run in done),
        step_ms=tuple(value for run in quiet for value in run["step_ms"]),
        node_mb=middle("node_nbytes", 1e-6),
        state_mb=middle("state_nbytes", 1e-6),
        peak_mb=middle("peak_nbytes", 1e-6),
        loss=done[0]["losses"][-1],
        foreign=max(run["foreign"] for run in quiet),
    )


def losses_agree(losses: Sequence[float], reference: Sequence[float] | None) -> bool:
    """Return whether every step's loss is the reference's within LOSS_TOLERANCE."""
    if reference is None or len(losses) != len(reference):
        return False
    return worst_difference(losses, reference) <= LOSS_TOLERANCE


def ahead(slower: Row, faster: Row) -> float:
    """How many times as fast `faster` is."""
    return slower.median_ms / faster.median_ms
