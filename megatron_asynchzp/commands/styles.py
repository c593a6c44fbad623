# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how pictures look: colours and their meaning, sizes, titles and the frame of a plot."""

from typing import Any

from megatron_asynchzp.errors import require

# Okabe and Ito's colours, which differ for any colour vision; where there are markers, in grey too.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
PINK, YELLOW, VERMILION = "#CC79A7", "#F0E442", "#B03A00"
INK, GREY, GRID, RED = "#333333", "#999999", "#dddddd", "#D00000"

# A colour has one meaning in all pictures of a kind. Pictures of systems: whose it is.
OURS, STOCK, PEER = VERMILION, BLUE, SKY
# Pictures of a step: what happened in it.
STEP_COLOURS = {
    "forward": BLUE,
    "backward": GREEN,
    "optimizer": INK,
    "host": VERMILION,
    "wait": RED,
    "gather": SKY,
    "reduce": ORANGE,
    "grad-sync": PINK,
    "matrices": YELLOW,
    "param-sync": GREY,
}

WIDTH_IN, DPI = 10.0, 130  # a page shows about 85 pixels an inch: 8 points can still be read
SMALL, NORMAL = 8, 9  # points of marks within a plot, and of axes and legends

SIZES_MEANING = (
    "(P,G,O): P ranks share one copy of the parameters, G of the gradients, O of the optimizer "
    "states"
)


def new_figure(height: float) -> Any:
    require("matplotlib", "a picture")
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height), layout="constrained")


def bare(plot: Any, grid: str | None = None) -> None:
    """Drop the frame's top and right; draw lines across one axis ("x", "y" or "both")."""
    plot.spines[["top", "right"]].set_visible(False)
    plot.tick_params(labelsize=SMALL)
    if grid is not None:
        plot.grid(axis=grid, color=GRID, linewidth=0.6)
        plot.set_axisbelow(True)


def set_title(plot: Any, text: str) -> None:
    plot.set_title(text, loc="left", fontsize=NORMAL, fontweight="bold", color=INK)


def add_caption(figure: Any, *lines: str) -> None:
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=SMALL, color=INK)
