# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of published_errors.py and of planner_errors.py into Markdown: how far the
planner is from what others measured, and from the test-bed.

    python -m scripts.report.planner_table runs/errors.jsonl
"""

from collections.abc import Sequence

from scripts.report.records import markdown_table, print_table

_HEAD = ["source", "predicted points", "mean error", "worst error", "bounds", ""]


def markdown(lines: Sequence[dict]) -> str:
    """One row for each source, then what each assumes."""
    summaries = [line for line in lines if line["kind"] == "summary"]
    rows = [
        [
            one["title"],
            str(one["points"]),
            f"{one['mean']:.1%}",
            f"{one['worst']:.1%}",
            f"{one['mean_bound']:.0%}, {one['worst_bound']:.0%}",
            "holds" if one["holds"] else "**missed**",
        ]
        for one in summaries
    ]
    notes = [
        f"- *{one['title']}*. {one['source']}. Assumed: {one['assumed']}." for one in summaries
    ]
    return "\n".join([markdown_table(_HEAD, rows), *notes])


def points(lines: Sequence[dict]) -> str:
    """Every point that others measured."""
    head = ["series", "point", "ranks", "measured", "predicted", "error"]
    rows = []
    for line in lines:
        if line["kind"] == "published":
            rows.append(
                [
                    line["series"],
                    line["name"],
                    str(line["ranks"]),
                    _figure(line["measured"]),
                    _figure(line["predicted"]),
                    "fitted" if line["fitted"] else f"{line['error']:+.1%}",
                ]
            )
    return markdown_table(head, rows, num_left=2)


def testbed(lines: Sequence[dict]) -> str:
    """What was measured on the test-bed, then what was chosen there, then one line for all."""
    head = ["cluster", "model", "P, G, O x micro-batches", "measured ms", "predicted ms", "error"]
    rows = [
        [
            *(line[key] for key in ("network", "model", "name")),
            *(f"{line[key]:.0f}" for key in ("measured", "predicted")),
            "fitted" if line["fitted"] else f"{line['error']:+.1%}",
        ]
        for line in lines
        if line["kind"] == "point"
    ]
    chosen = [
        [
            *(line[key] for key in ("network", "model", "chosen", "best")),
            str(line["candidates"]),
            f"{line['ratio']:.3f}",
        ]
        for line in lines
        if line["kind"] == "choice"
    ]
    (of_all,) = [line for line in lines if line["kind"] == "summary"]
    text = (
        f"{of_all['points']} predicted steps: mean error {of_all['mean']:.1%}, worst "
        f"{of_all['worst']:.1%} (bounds {of_all['mean_bound']:.0%} and "
        f"{of_all['worst_bound']:.0%}). {of_all['good_choices']} of {of_all['choices']} choices "
        f"within 2% of the best that was measured. {'Holds' if of_all['holds'] else '**Missed**'}."
    )
    choice_head = ["cluster", "model", "chosen", "measured best", "measured plans", "ratio"]
    return "\n".join(
        [text, "", markdown_table(head, rows, 3), markdown_table(choice_head, chosen, 4)]
    )


def _figure(value: float) -> str:
    return f"{value:.1%}" if value < 1 else f"{value:.0f}"


if __name__ == "__main__":
    print_table("planner_table", "scripts.bench.published_errors", markdown)
