# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of scaling's records: for each axis its places, and at each place what was measured and
what the cost model gives, kept apart.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scripts.report.compare_rows import Row, row_of
from scripts.report.records import RecordsError
from scripts.testbed.cpu_usage import FOREIGN_LIMIT


@dataclass(frozen=True)
class Modelled:
    """The cost model of one contender at one place. compute_ms: the computation of a step that it
    was given, either "measured" there or the "emulated" time alone."""

    step_ms: float
    node_mb: float
    state_mb: float
    compute_ms: float
    compute: str


@dataclass(frozen=True)
class Place:
    """One point, where it is `at` on an axis. alone_ms: a step of every rank without communication,
    of which `emulated_ms` is time that passes; busy: the largest share of the machine that was used
    in any run, by any process; measured, modelled: by contender; emulated: as `modelled`, given the
    emulated computation even where it was measured."""

    point: tuple[int, ...]
    at: int
    emulated_ms: float
    alone_ms: tuple[float, ...]
    busy: float
    measured: dict[str, Row]
    modelled: dict[str, Modelled]
    emulated: dict[str, Modelled]

    @property
    def is_measured(self) -> bool:
        """Whether any contender was to run here."""
        return bool(self.measured)

    @property
    def compute_ms(self) -> float:
        """Of a step without communication: measured where it was."""
        return statistics.median(self.alone_ms or [self.emulated_ms])

    def error(self, name: str) -> float | None:
        """Measured step over modelled step."""
        row, model = self.measured.get(name), self.modelled.get(name)
        return row.median_ms / model.step_ms if row and row.is_timed and model else None


@dataclass(frozen=True)
class AxisRows:
    """All places of one axis in order, and all contenders."""

    name: str
    places: tuple[Place, ...]
    contenders: tuple[str, ...]

    @property
    def border(self) -> float | None:
        """Between the last place with a measurement and the first that is only modelled."""
        measured = [place.at for place in self.places if place.is_measured]
        beyond = [place.at for place in self.places if not place.is_measured]
        beyond = [at for at in beyond if not measured or at > max(measured)]
        return (max(measured) * min(beyond)) ** 0.5 if measured and beyond else None


def axes_of(records: Iterable[dict]) -> list[AxisRows]:
    """In the order in which the axes appear. Raises RecordsError."""
    records = [record for record in records if record["kind"] != "machine"]
    _check_one_setting(records)
    at_points: dict[tuple, list[dict]] = defaultdict(list)
    for record in records:
        at_points[tuple(record["point"].values())].append(record)
    on_axes: dict[str, list[Place]] = defaultdict(list)
    names: dict[str, None] = {}
    for point, those in at_points.items():
        names |= dict.fromkeys(one["name"] for one in those if "name" in one)
        places = {axis: at for record in those for axis, at in record["axes"].items()}
        for axis, at in places.items():
            on_axes[axis].append(_place(point, at, those))
    return [
        AxisRows(axis, tuple(sorted(places, key=lambda place: place.at)), tuple(names))
        for axis, places in on_axes.items()
    ]


def _check_one_setting(records: Sequence[dict]) -> None:
    for key in ("profile", "layer_ms", "slow_motion", "steps"):
        found = {str((record["workload"] | record)[key]) for record in records}
        if len(found) > 1:
            raise RecordsError(f"records of different {key}: {' and '.join(sorted(found))}")


def _place(point: tuple[int, ...], at: int, records: Sequence[dict]) -> Place:
    runs: dict[str, list[dict]] = defaultdict(list)
    given: dict[str, dict[str, Modelled]] = {"emulated": {}, "measured": {}}
    for record in records:
        if record["kind"] == "run":
            runs[record["name"]].append(record)
        if record["kind"] == "modelled":
            given[record["compute"]][record["name"]] = _modelled(record)
    done = [record for of_one in runs.values() for record in of_one if not record["reason"]]
    reference = done[0]["losses"] if done else None
    alone = [one for one in records if one["kind"] == "compute" and not one["reason"]]
    quiet = [one for one in alone if one["foreign"] <= FOREIGN_LIMIT] or alone
    return Place(
        point=point,
        at=at,
        emulated_ms=records[0]["emulated_ms"],
        alone_ms=tuple(ms for one in quiet for ms in one["step_ms"]),
        busy=max((record["busy"] for record in done), default=0.0),
        measured={name: row_of(of_one, reference) for name, of_one in runs.items()},
        modelled=given["emulated"] | given["measured"],
        emulated=given["measured"] | given["emulated"],
    )


def _modelled(record: dict) -> Modelled:
    return Modelled(
        record["step_ms"],
        1e-6 * record["node_nbytes"],
        1e-6 * record["state_nbytes"],
        record["compute_ms"],
        record["compute"],
    )


def errors(axes: Iterable[AxisRows]) -> dict[str, list[float]]:
    """Of each contender: measured over modelled step, wherever there are both, each point once."""
    found: dict[str, dict[tuple, float]] = defaultdict(dict)
    for axis in axes:
        for place in axis.places:
            for name in axis.contenders:
                if (error := place.error(name)) is not None:
                    found[name][place.point] = error
    return {name: list(of_one.values()) for name, of_one in found.items()}
