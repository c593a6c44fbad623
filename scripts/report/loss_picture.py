# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws two training runs over the same batches: losses, their difference, and bytes of a rank."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import (
    GREEN,
    GREY,
    GRID,
    INK,
    NORMAL,
    ORANGE,
    PINK,
    SMALL,
    YELLOW,
    bare,
)

BASELINE, CANDIDATE = styles.STOCK, styles.OURS
RINGS = "rings"
_SIZES = "P, G, O: how many ranks share one copy of the parameters, the gradients, Adam's moments"
STATES = {  # key of the report: (label, colour), from the bottom of the bar up
    "model_param": ("parameters", GREEN),
    "main_grad": ("gradients", ORANGE),
    "main_param": ("main parameters", PINK),
    "optimizer_state": ("Adam's two moments", YELLOW),
    RINGS: ("in flight", GREY),
}


class Run(NamedTuple):
    """One run: its name for people, the loss of each step, bytes of each state on one rank."""

    name: str
    losses: Sequence[float]
    state_bytes: Mapping[str, int]


def last_digit(loss: float) -> float:
    """What one unit of the last digit is worth in a loss that Megatron prints as 1.234567E+00."""
    return float(f"1e{int(f'{loss:E}'.split('E')[1]) - 6}")


def _draw_losses(axes, baseline: Run, candidate: Run) -> None:
    steps = range(1, len(baseline.losses) + 1)
    axes.plot(steps, baseline.losses, color=BASELINE, linewidth=5, alpha=0.5, label=baseline.name)
    axes.plot(steps, candidate.losses, color=CANDIDATE, linewidth=1.2, label=candidate.name)
    axes.set_ylabel("training loss (nats per byte)", fontsize=NORMAL)
    styles.set_title(axes, "training loss over the same batches")
    axes.legend(frameon=False, fontsize=NORMAL)


def _draw_differences(axes, baseline: Run, candidate: Run) -> None:
    steps = range(1, len(baseline.losses) + 1)
    digit = last_digit(baseline.losses[0])
    apart = [abs(a - b) for a, b in zip(baseline.losses, candidate.losses, strict=True)]
    shown = [max(value, digit / 3) for value in apart]  # a log axis has no zero
    top = max(filter(math.isfinite, shown), default=0.0)
    axes.scatter(steps, shown, s=9, color=CANDIDATE, linewidths=0)
    axes.axhline(digit, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate(
        "last\nprinted\ndigit",
        (1, digit),
        xycoords=("axes fraction", "data"),
        xytext=(2, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL,
        color=INK,
    )
    axes.set_yscale("log")
    axes.set_ylim(digit / 5, max(30 * digit, 3 * top))
    equal = sum(value == 0 for value in apart)
    axes.set_title(
        f"{equal} of {len(apart)} printed losses equal in every digit (drawn at the bottom)",
        loc="left",
        fontsize=NORMAL,
        color=INK,
    )
    axes.set_ylabel("|difference|\n(nats per byte)", fontsize=NORMAL)
    axes.set_xlabel("training step", fontsize=NORMAL)


def _draw_states(axes, runs: Sequence[Run]) -> None:
    totals = [sum(run.state_bytes[state] for state in STATES) for run in runs]
    bottoms = [0.0] * len(runs)
    for state, (label, colour) in STATES.items():
        heights = [run.state_bytes[state] / 2**20 for run in runs]
        if not any(heights):  # fp32 has no separate main parameters
            continue
        axes.bar(
            range(len(runs)),
            heights,
            bottom=bottoms,
            width=0.55,
            color=colour,
            edgecolor="white",
            label=label,
        )
        for i, height in enumerate(heights):
            if height > 0.06 * max(totals) / 2**20:
                dark = state in ("model_param",)
                axes.text(
                    i,
                    bottoms[i] + height / 2,
                    f"{height:.2f}",
                    ha="center",
                    va="center",
                    fontsize=SMALL,
                    color="white" if dark else INK,
                )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for i, (run, total) in enumerate(zip(runs, totals, strict=True)):
        text = f"{total / 2**20:.2f}"
        if run.state_bytes[RINGS]:
            text += f"\n({(total - run.state_bytes[RINGS]) / 2**20:.2f} at rest)"
        axes.text(
            i, bottoms[i], f"{text}\n", ha="center", va="bottom", weight="bold", fontsize=NORMAL
        )
    axes.set_xticks(range(len(runs)), [run.name.replace(", ", ",\n") for run in runs])
    axes.set_ylim(0, 1.45 * max(bottoms))
    axes.set_ylabel("held by the fullest rank (MiB)", fontsize=NORMAL)
    styles.set_title(axes, "memory of a rank")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="upper right", fontsize=NORMAL)


def draw(baseline: Run, candidate: Run, title: str, file: Path) -> None:
    """Write the picture as a PNG to `file`. Both runs have equally many losses."""
    figure = styles.new_figure(5.4)
    axes = figure.subplot_mosaic(
        [["loss", "state"], ["difference", "state"]], width_ratios=[1.8, 1], height_ratios=[2, 1]
    )
    axes["loss"].sharex(axes["difference"])
    axes["loss"].tick_params(labelbottom=False)
    _draw_losses(axes["loss"], baseline, candidate)
    _draw_differences(axes["difference"], baseline, candidate)
    _draw_states(axes["state"], (baseline, candidate))
    for ax in axes.values():
        bare(ax)
    for name in ("loss", "difference"):
        axes[name].grid(color=GRID, linewidth=0.6)
    styles.add_caption(figure, f"{title}. {_SIZES}")
    figure.savefig(file, dpi=styles.DPI)
