# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns where the legend of a picture stands."""

from typing import Any

from megatron_asynchzp.commands.styles import NORMAL


def add_legend(figure: Any, handles: list[Any], ncols: int | None = None) -> None:
    """Add a legend above all plots, in one row unless `ncols` has fewer columns."""
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=ncols or len(handles),
        frameon=False,
        fontsize=NORMAL,
        handlelength=1.4,
        columnspacing=1.4,
    )
