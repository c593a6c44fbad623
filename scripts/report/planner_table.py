# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of published_errors.py into Markdown."""

from collections.abc import Sequence
from statistics import mean

from scripts.report.records import markdown_table

_HEAD = ["source", "network", "fitted", "predicted", "mean error", "worst error", "bounds", ""]
_LARGE = 0.1


def markdown(lines: Sequence[dict]) -> str:
    """One row for each source, then a line for all."""
    found = [one for one in lines if one["kind"] == "summary"]
    rows = [
        [
            one["title"],
            "stated" if one["is_network_stated"] else "assumed",
            str(one["fitted"]),
            str(one["points"]),
            f"{one['mean']:.1%}",
            f"{one['worst']:.1%}",
            f"{one['mean_bound']:.0%}, {one['worst_bound']:.0%}",
            "holds" if one["holds"] else "**missed**",
        ]
        for one in found
    ]
    stated = {one["file"] for one in found if one["is_network_stated"]}
    held_out = [line for line in lines if line["kind"] == "published" and not line["fitted"]]
    errors = {
        name: mean(abs(line["error"]) for line in of_those)
        for name, of_those in (
            ("where the network is stated", [one for one in held_out if one["file"] in stated]),
            ("of all", held_out),
        )
        if of_those
    }
    right, pairs = (sum(one[name] for one in found) for name in ("pairs_right", "pairs"))
    means = ", ".join(f"{error:.1%} {name}" for name, error in errors.items())
    ranked = (
        f" Of {pairs} pairs of alternatives more than 3% apart, {right} are in the right order."
    )
    return (
        f"{markdown_table(_HEAD, rows).rstrip()}\n\nMean error: {means}.{ranked if pairs else ''}"
    )


def misses(lines: Sequence[dict]) -> str:
    """Write a line for each source with rows off by more than a tenth, with the reasons."""
    held_out = [line for line in lines if line["kind"] == "published" and not line["fitted"]]
    return "\n".join(
        f"- {one['title']} ({_far(one['file'], held_out)}): {one['missed']}."
        for one in lines
        if one["kind"] == "summary" and one["missed"]
    )


def _far(file: str, held_out: Sequence[dict]) -> str:
    """How many rows of a source are off by more than a tenth, and by how much."""
    errors = [one["error"] for one in held_out if one["file"] == file]
    far = sorted(error for error in errors if abs(error) > _LARGE)
    return f"{len(far)} of {len(errors)} rows, " + " to ".join(
        f"{error:+.1%}" for error in dict.fromkeys((far[0], far[-1]))
    )
