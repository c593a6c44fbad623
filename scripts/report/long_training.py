# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the record of long_training.py into a table, a sentence about goodput, and a picture."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_asynchzp.commands import styles
from megatron_asynchzp.planner.goodput import SaveTimes
from scripts.report.legends import add_legend
from scripts.report.records import markdown_table

STOCK = ("stock-1", "stock-2", "stock-3")
NAMES = {
    "ours": ("AsyncHZP, default sizes, early update, bf16", styles.OURS),
    "failures": ("the same, with failures and on other ranks", styles.INK),
    "pasa": ("AsyncHZP with PASA attention, fp16", styles.GREEN),
    "fp8": ("AsyncHZP, FP8 by tensor, gathers of codes", styles.BLUE),
}
_SMOOTHED = 5  # noted losses, of which a point of a curve is the mean


def losses(lines: Sequence[dict], run: str, kind: str) -> dict[int, float]:
    """By step, without those that were skipped."""
    own = [line for line in lines if line["kind"] == kind and line["run"] == run]
    return {
        line["step"]: line["loss"] for line in sorted(own, key=lambda x: x["step"]) if line["loss"]
    }


def starts_with_failures(lines: Sequence[dict]) -> list[dict]:
    """The starts of the run with failures; only the last one has none."""
    return [line for line in lines if line["kind"] == "start" and line["run"] == "failures"]


def markdown(lines: Sequence[dict]) -> str:
    """A row for each run, next to what the seeds of stock Megatron had at its last step."""
    seeds = [_smooth(losses(lines, run, "step")) for run in STOCK]
    validated = [losses(lines, run, "validation") for run in STOCK]
    failed = [start for start in starts_with_failures(lines) if start["fault"]]
    rows = []
    for run, (name, _) in NAMES.items():
        if not (curve := _smooth(losses(lines, run, "step"))):
            continue
        last, found = max(curve), losses(lines, run, "validation")
        row = [name, str(last), f"{curve[last]:.4f}", _range(one[last] for one in seeds)]
        step = max(found, default=0)
        row += [f"{found[step]:.4f}", _range(one[step] for one in validated)] if step else ["", ""]
        rows.append([*row, str(len(failed)) if run == "failures" else "0"])
    titles = ["run", "steps", "training loss", "stock's", "validation loss", "stock's", "failures"]
    table = markdown_table(titles, rows)
    return table if not failed else f"{table}\n{_said(*goodput(lines))}"


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.4f} to {found[-1]:.4f}"


def _said(measured: float, planned: float) -> str:
    return (
        f"With failures {measured:.0%} of its time went into steps that count; the planner's "
        f"formula says {planned:.0%} for the same times of steps, saves and restarts."
    )


def goodput(lines: Sequence[dict]) -> tuple[float, float]:
    """The part of its time in which the run with failures trained: measured, and by the planner.

    Its failures strike in steps alone, never in a restart. So the planner's formula is asked for
    the time between the restarts, without any, and their part of all time comes off afterwards.
    """
    starts = starts_with_failures(lines)
    again = [start["repeated"] for start in starts[1:]] + [0]
    usual_s = statistics.median(start["step_s"] for start in starts if "step_s" in start)
    counted_s = sum(
        (start["to"] - start["from"] - repeated) * start.get("step_s", usual_s)
        for start, repeated in zip(starts, again, strict=True)
    )
    total_s = sum(start["wall_s"] for start in starts)
    step_s = counted_s / max(start["to"] for start in starts)
    save_s = statistics.mean(start["save_s"] for start in starts if start.get("save_s") is not None)
    restarts_s = sum(
        start["start_s"] + start["first_step_s"] - start.get("step_s", usual_s) for start in starts
    )
    ends_s = [start["to_the_end_s"] for start in starts if start["to_the_end_s"] is not None]
    up_s = total_s - restarts_s - sum(ends_s)
    times = SaveTimes(up_s / len(ends_s), 0.0, save_s, save_s)
    return counted_s / total_s, times.goodput(starts[0]["save_every"] * step_s) * up_s / total_s


def draw(lines: Sequence[dict], file: Path) -> None:
    """Write the picture: training losses, how far each is from the seeds' mean, every failure."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = styles.new_figure(5.0)
    panels: Any = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1.2])
    band = [_smooth(losses(lines, run, "step")) for run in STOCK]
    steps = sorted(set.intersection(*(set(one) for one in band)))
    mean = {step: statistics.mean(one[step] for one in band) for step in steps}
    for axes, below in zip(panels, (dict.fromkeys(steps, 0.0), mean), strict=True):
        ends = ([of(one[s] for one in band) - below[s] for s in steps] for of in (min, max))
        axes.fill_between(steps, *ends, color=styles.STOCK, alpha=0.35, linewidth=0)
        for run, (_, colour) in NAMES.items():
            curve = _smooth(losses(lines, run, "step"))
            values = [curve[step] - below[step] for step in steps if step in curve]
            axes.plot([s for s in steps if s in curve], values, color=colour, linewidth=1.1)
        styles.bare(axes, grid="y")
    handles = [Patch(color=styles.STOCK, alpha=0.35, label="stock Megatron, bf16, three seeds")]
    handles += [Line2D([], [], color=colour, label=name) for name, colour in NAMES.values()]
    add_legend(figure, handles, ncols=2)
    for start in starts_with_failures(lines):
        if start["fault"]:
            for axes in panels:
                axes.axvline(start["to"], color=styles.GREY, linewidth=0.7, linestyle=":", zorder=0)
            words = f"{start['fault']}, {start['ranks']} ranks"
            place = {"rotation": 90, "ha": "right", "va": "top", "fontsize": styles.SMALL}
            panels[0].text(start["to"], max(mean.values()), words, color=styles.INK, **place)
    panels[0].set_ylabel("training loss (nats per byte)", fontsize=styles.NORMAL)
    panels[1].set_ylabel("from the seeds' mean", fontsize=styles.NORMAL)
    panels[1].set_xlabel("training step", fontsize=styles.NORMAL)
    styles.add_caption(
        figure, f"A point: the mean of {_SMOOTHED} noted losses. Dotted: a failure, at its step"
    )
    figure.savefig(file, dpi=styles.DPI)


def _smooth(found: dict[int, float]) -> dict[int, float]:
    """The mean of each loss and those just before it."""
    steps, values = list(found), list(found.values())
    return {
        step: statistics.mean(values[max(0, place - _SMOOTHED + 1) : place + 1])
        for place, step in enumerate(steps)
    }
