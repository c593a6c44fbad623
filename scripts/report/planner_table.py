# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of published_errors.py and of planner_errors.py into Markdown: how far the
planner is from what others measured, and from the test-bed.
"""

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
    """A line for each source with rows that are off by more than a tenth, and what is known of
    why."""
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


def testbed(lines: Sequence[dict]) -> str:
    """A row for each cluster of the test-bed, then one line for all."""
    found: dict[str, list[dict]] = {}
    for line in lines:
        if line["kind"] in ("point", "choice"):
            found.setdefault(line["network"], []).append(line)
    head = ["cluster", "predicted steps", "measured ms", "mean error", "worst error", "choices"]
    rows = [[name, *_cluster(of_one)] for name, of_one in found.items() if _predicted(of_one)]
    (of_all,) = [line for line in lines if line["kind"] == "summary"]
    text = (
        f"{of_all['points']} predicted steps: mean error {of_all['mean']:.1%}, worst "
        f"{of_all['worst']:.1%} (bounds {of_all['mean_bound']:.0%} and "
        f"{of_all['worst_bound']:.0%}). {of_all['good_choices']} of {of_all['choices']} choices "
        f"within 2% of the best that was measured. {'Holds' if of_all['holds'] else '**Missed**'}."
    )
    return "\n".join([text, "", markdown_table([*head, "the choice over the best"], rows)])


def _predicted(lines: Sequence[dict]) -> list[dict]:
    return [line for line in lines if line["kind"] == "point" and not line["fitted"]]


def _cluster(lines: Sequence[dict]) -> list[str]:
    points = _predicted(lines)
    ratios = [line["ratio"] for line in lines if line["kind"] == "choice"]
    measured = [line["measured"] for line in points]
    worst = max((line["error"] for line in points), key=abs)
    return [
        str(len(points)),
        f"{min(measured):.0f} to {max(measured):.0f}",
        f"{mean(abs(line['error']) for line in points):.1%}",
        f"{worst:+.1%}",
        str(len(ratios)),
        f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "",
    ]
