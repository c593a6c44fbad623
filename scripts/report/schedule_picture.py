# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws what bench_schedules.py measured on networks of several speeds: the step of each contender
as a multiple of its floor, over how long communication takes beside computation.

    python -m scripts.report.schedule_picture runs/sweep.jsonl --output schedules.png
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from scripts.report.records import RecordsError, write_picture
from scripts.report.schedule_table import COMMUNICATION, COMPUTE
from scripts.report.styles import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    bare,
    new_figure,
)

GOAL = 1.1
# Markers tell contenders apart in grey.
# fmt: off
_STYLES = (
    (VERMILION, "o"), (BLUE, "s"), (GREEN, "D"), (SKY, "^"), (PINK, "v"), (ORANGE, "P"),
    ("#000000", "X"), (GREY, "*"),
)
# fmt: on


class Point(NamedTuple):
    """One contender on one network: communication alone over computation alone, and the step over
    the longer of the two."""

    load: float
    ratio: float


def curves(records: Iterable[dict]) -> dict[str, list[Point]]:
    """By contender, over the networks; medians where one was measured more than once.

    Raises RecordsError where a network lacks one of the two floors.
    """
    by_network: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        network = by_network[record["profile"]["inter_gbit"]]
        network[record["contender"]].append(record["median_ms"])
    told: dict[str, list[Point]] = defaultdict(list)
    for gbit, of_contender in sorted(by_network.items(), reverse=True):
        step_ms = {name: statistics.median(times) for name, times in of_contender.items()}
        try:
            compute_ms, communication_ms = step_ms.pop(COMPUTE), step_ms.pop(COMMUNICATION)
        except KeyError as error:
            raise RecordsError(f"{error.args[0]!r} was not measured at {gbit:g} Gbit/s") from None
        floor_ms = max(compute_ms, communication_ms)
        for name, ms in step_ms.items():
            told[name].append(Point(communication_ms / compute_ms, ms / floor_ms))
    return dict(told)


def make_figure(records: Iterable[dict]) -> Any:
    """Raises RecordsError."""
    figure = new_figure(8, 4.5)
    plot = figure.subplots()
    for (name, points), (colour, marker) in zip(curves(records).items(), _STYLES):
        plot.plot(
            [point.load for point in points],
            [point.ratio for point in points],
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.2,
            label=name,
        )
    plot.axhline(1.0, color=INK, linewidth=0.8)
    plot.axhline(GOAL, color=INK, linewidth=0.8, linestyle=":")
    plot.axvline(1.0, color="#bbbbbb", linewidth=0.8)
    plot.set_xlabel("communication alone / computation alone")
    plot.set_ylabel("step / the longer of the two")
    plot.set_ylim(bottom=0.98)
    bare(plot)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def draw(records: Iterable[dict], file: Path) -> None:
    """Write the picture as a PNG. Raises RecordsError."""
    make_figure(records).savefig(file, dpi=120)


if __name__ == "__main__":
    write_picture("schedule_picture", "scripts.bench.bench_schedules", draw)
