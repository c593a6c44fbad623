# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws what bench_schedules.py measured on networks of several speeds: the step of each contender
as a multiple of its floor, over how long communication takes beside computation.

    python scripts/report/schedule_picture.py runs/sweep.jsonl --output schedules.png
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE, COMMUNICATION = "compute only", "communication only"
GOAL = 1.1
# Okabe and Ito's colours, told apart with any colour vision; markers tell them apart in grey.
# fmt: off
_STYLES = (
    ("#B03A00", "o"), ("#0072B2", "s"), ("#009E73", "D"), ("#56B4E9", "^"), ("#CC79A7", "v"),
    ("#E69F00", "P"), ("#000000", "X"), ("#999999", "*"),
)
# fmt: on


class Point(NamedTuple):
    """One contender on one network: communication alone over computation alone, and the step over
    the longer of the two."""

    load: float
    ratio: float


def curves(records: Iterable[dict]) -> dict[str, list[Point]]:
    """By contender, over the networks; medians where one was measured more than once.

    Raises ValueError where a network lacks one of the two floors.
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
            raise ValueError(f"{error.args[0]!r} was not measured at {gbit:g} Gbit/s") from None
        floor_ms = max(compute_ms, communication_ms)
        for name, ms in step_ms.items():
            told[name].append(Point(communication_ms / compute_ms, ms / floor_ms))
    return dict(told)


def make_figure(records: Iterable[dict]) -> Any:
    """Raises ValueError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
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
    plot.axhline(1.0, color="#333333", linewidth=0.8)
    plot.axhline(GOAL, color="#333333", linewidth=0.8, linestyle=":")
    plot.axvline(1.0, color="#bbbbbb", linewidth=0.8)
    plot.set_xlabel("communication alone / computation alone")
    plot.set_ylabel("step / the longer of the two")
    plot.set_ylim(bottom=0.98)
    plot.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[2] != "--output" or not Path(sys.argv[1]).is_file():
        sys.exit(
            "usage: schedule_picture.py FILE --output PNG    FILE: the --out of bench_schedules.py"
        )
    records = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    try:
        make_figure(records).savefig(sys.argv[3], dpi=120)
    except ValueError as error:
        sys.exit(f"schedule_picture: {error}")


if __name__ == "__main__":
    main()
