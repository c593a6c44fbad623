# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of published_errors.py and of planner_errors.py into Markdown: how far the
planner is from what others measured, and from the test-bed.

    python -m scripts.report.planner_table runs/errors.jsonl
"""

from collections.abc import Sequence
from statistics import mean

from scripts.report.records import markdown_table, print_table

_HEAD = ["source", "predicted points", "mean error", "worst error", "bounds", ""]


def markdown(lines: Sequence[dict]) -> str:
    """One row for each source."""
    rows = [
        [
            one["title"],
            str(one["points"]),
            f"{one['mean']:.1%}",
            f"{one['worst']:.1%}",
            f"{one['mean_bound']:.0%}, {one['worst_bound']:.0%}",
            "holds" if one["holds"] else "**missed**",
        ]
        for one in lines
        if one["kind"] == "summary"
    ]
    return markdown_table(_HEAD, rows)


def testbed(lines: Sequence[dict]) -> str:
    """A row for each cluster of the test-bed, then one line for all."""
    found: dict[str, list[dict]] = {}
    for line in lines:
        if line["kind"] in ("point", "choice"):
            found.setdefault(line["network"], []).append(line)
    head = ["cluster", "predicted steps", "measured ms", "mean error", "worst error", "choices"]
    rows = [[name, *_cluster(of_one)] for name, of_one in found.items()]
    (of_all,) = [line for line in lines if line["kind"] == "summary"]
    text = (
        f"{of_all['points']} predicted steps: mean error {of_all['mean']:.1%}, worst "
        f"{of_all['worst']:.1%} (bounds {of_all['mean_bound']:.0%} and "
        f"{of_all['worst_bound']:.0%}). {of_all['good_choices']} of {of_all['choices']} choices "
        f"within 2% of the best that was measured. {'Holds' if of_all['holds'] else '**Missed**'}."
    )
    return "\n".join([text, "", markdown_table([*head, "the choice over the best"], rows)])


def _cluster(lines: Sequence[dict]) -> list[str]:
    points = [line for line in lines if line["kind"] == "point" and not line["fitted"]]
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


if __name__ == "__main__":
    print_table("planner_table", "scripts.bench.published_errors", markdown)
