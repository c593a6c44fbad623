# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how pictures look: colours, and the frame of a plot."""

from typing import Any

# Okabe and Ito's colours, which differ for any colour vision; where there are markers, in grey too.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
PINK, YELLOW, VERMILION = "#CC79A7", "#F0E442", "#B03A00"
INK, GREY, GRID, RED = "#333333", "#999999", "#dddddd", "#D00000"


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure in inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def bare(plot: Any, grid: str | None = None) -> None:
    """Without the frame's top and right; with lines across from one axis ("x", "y" or "both")."""
    plot.spines[["top", "right"]].set_visible(False)
    if grid is not None:
        plot.grid(axis=grid, color=GRID, linewidth=0.6)
        plot.set_axisbelow(True)
