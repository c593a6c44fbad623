# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the lines of scripts/train/census.py into counts, and a table by verdict."""

from collections import Counter
from collections.abc import Sequence

from scripts.report.records import markdown_table

_VERDICTS = "accepted as it is", "accepted, weakened", "refused", "needs more ranks"


def count(lines: Sequence[dict], what: str) -> str:
    """what: "cases", or those that start with "stock" Megatron or with "ours"."""
    if what == "cases":
        return str(len(lines))
    return str(sum(line[what] is None for line in lines))


def _verdicts(lines: Sequence[dict]) -> list[list[dict]]:
    """The lines of each verdict. What no flag of ours decides stock Megatron refuses too."""
    parts: list[list[dict]] = [[], [], [], []]
    for line in lines:
        ours = line["ours"]
        if ours is None:
            place = 1 if line["lost"] else 0
        else:
            place = 2 if ours["by"].startswith("--") else 3
            assert place == 2 or line["stock"] is not None, line["case"]
        parts[place].append(line)
    return parts


def by_verdict(lines: Sequence[dict]) -> str:
    """A row for each way in which a recipe may end, the commonest causes first."""
    parts = _verdicts(lines)
    causes = "", lost(parts[1]), refused(parts[2]), ""
    rows = [
        [title, str(len(part)), cause]
        for title, part, cause in zip(_VERDICTS, parts, causes, strict=True)
    ]
    return markdown_table(["the recipe is", f"of {len(lines)}", "because of"], rows, 3)


def lost(lines: Sequence[dict]) -> str:
    """List the arguments that are switched off, with the number of recipes."""
    names = Counter(name for line in lines for name in line["lost"])
    return ", ".join(f"`{name}` {count}" for name, count in names.most_common())


def refused(lines: Sequence[dict]) -> str:
    """By which flag, and how many."""
    names = Counter(f"`{line['ours']['by']}`" for line in lines)
    return ", ".join(f"{name} {count}" for name, count in names.most_common())
