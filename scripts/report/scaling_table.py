# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of scaling.py, of one or more runs, into Markdown: for each axis the step of
every contender, measured or modelled, and what leaves a node and what a rank holds.

    python -m scripts.report.scaling_table runs/scaling/records.jsonl
"""

import statistics
from collections.abc import Callable, Iterable

from scripts.report.compare_rows import Row
from scripts.report.records import machine_line, markdown_table, print_table
from scripts.report.records import read as read
from scripts.report.scaling_rows import AxisRows, Modelled, Place, axes_of, errors
from scripts.testbed.cpu_usage import FOREIGN_LIMIT

NOTES = """\
How to read it. All contenders of a point train the same GPT in fp32 on the same batches, by
Megatron's `pretrain()`; where one's losses differ from the first one's by more than 1e-5 in any
step it is RED and has no time.

- *step ms*: median (shortest to longest) of all timed steps, and after it measured over modelled.
  Places marked *modelled* were not run: their numbers are the cost model's, in italics.
- *compute only*: a step of ranks that do not communicate (median; one value per rank), and the part
  of it that is emulated. The rest is real arithmetic, the optimizer and Python. Where the model
  stands beside a measurement it is given this; beyond, the emulated time alone.
- *busy*: the most of the machine's cores that was used in a run. The more, the more the ranks keep
  each other waiting, which the model knows nothing of.
- *MB off a node*: sent by the fullest node to others, per step; *state MB*: all tensors of the
  fullest rank between two steps, fixed buffers included. In brackets: modelled.
"""


def markdown(records: Iterable[dict]) -> str:
    """The whole report of the runs. Raises RecordsError."""
    records = list(records)
    axes = axes_of(records)
    parts = [_settings(next(one for one in records if one["kind"] != "machine"))] if axes else []
    parts += [_section(axis) for axis in axes]
    parts += ["\n".join([*_verdict(axes), ""])]
    parts += [machine_line(one) for one in records if one["kind"] == "machine"]
    return "\n".join([*parts, NOTES])


def _settings(record: dict) -> str:
    profile, slow = record["profile"], record["slow_motion"]
    return (
        f"Network {profile['name']}: {profile['inter_gbit']:g} Gbit/s and "
        f"{profile['inter_latency_us']:g} us between nodes, {profile['intra_gbit']:g} Gbit/s and "
        f"{profile['intra_latency_us']:g} us inside; {record['layer_ms']:g} ms forward of a layer "
        f"for a sample at the base; all of it {slow:g} times slower (slow motion).\n"
    )


def _section(axis: AxisRows) -> str:
    steps = markdown_table(
        [axis.name, "compute only", "busy", *axis.contenders],
        [
            [_at(place), _alone(place), _busy(place), *_cells(place, axis, step_cell)]
            for place in axis.places
        ],
        num_left=0,
    )
    sizes = markdown_table(
        [axis.name, *axis.contenders],
        [[_at(place), *_cells(place, axis, size_cell)] for place in axis.places],
        num_left=0,
    )
    return "\n".join(
        [
            f"### {axis.name}",
            "",
            "Step ms:",
            "",
            steps,
            "MB off a node per step; state MB:",
            "",
            sizes,
            *_reasons(axis),
        ]
    )


def _cells(
    place: Place, axis: AxisRows, cell: Callable[[Row | None, Modelled | None], str]
) -> list[str]:
    return [cell(place.measured.get(name), place.modelled.get(name)) for name in axis.contenders]


def _at(place: Place) -> str:
    return f"{place.at}" if place.is_measured else f"{place.at}, modelled"


def _alone(place: Place) -> str:
    emulated = f"{place.emulated_ms:.0f} emulated"
    if not place.alone_ms:
        return emulated
    return f"{statistics.median(place.alone_ms):.0f}, of which {emulated}"


def _busy(place: Place) -> str:
    return f"{place.busy:.0%}" if place.busy else ""


def step_cell(row: Row | None, model: Modelled | None) -> str:
    """What is measured wherever anything was to be; else what is modelled, in italics."""
    if row is None:
        return f"*{model.step_ms:.0f}*" if model else ""
    if row.reason:
        return "not run"
    if row.is_red:
        return "RED: wrong losses"
    text = f"{row.median_ms:.0f} ({min(row.step_ms):.0f} to {max(row.step_ms):.0f})"
    return f"{text} {row.median_ms / model.step_ms:.2f}" if model else text


def size_cell(row: Row | None, model: Modelled | None) -> str:
    """Bytes between nodes and state; red ones too, whose bytes are not in doubt."""
    if row is None:
        return f"*{model.node_mb:.2f}*; *{model.state_mb:.2f}*" if model else ""
    if row.reason:
        return "not run"
    state = "?" if row.state_mb is None else f"{row.state_mb:.2f}"
    if model is None:
        return f"{row.node_mb:.2f}; {state}"
    return f"{row.node_mb:.2f} ({model.node_mb:.2f}); {state} ({model.state_mb:.2f})"


def _reasons(axis: AxisRows) -> list[str]:
    """Why cells are empty, and which are not to be quoted."""
    lines = []
    for place in axis.places:
        for name, row in place.measured.items():
            if row.reason:
                lines.append(f"- {axis.name} {place.at}, {name}: {row.reason}.")
            if row.foreign > FOREIGN_LIMIT:
                lines.append(
                    f"- {axis.name} {place.at}, {name}: others used {row.foreign:.0%} of "
                    "the machine: not to be quoted."
                )
    return [*lines, ""] if lines else []


def _verdict(axes: Iterable[AxisRows]) -> list[str]:
    """How far the model is off, contender by contender."""
    lines = []
    for name, of_one in errors(axes).items():
        lines.append(
            f"- {name}: measured / modelled {statistics.median(of_one):.2f} in the median of "
            f"{len(of_one)} points, {min(of_one):.2f} to {max(of_one):.2f}."
        )
    return lines or ["Nothing was measured: all numbers are the cost model's."]


if __name__ == "__main__":
    print_table("scaling_table", "scripts.bench.scaling", markdown)
