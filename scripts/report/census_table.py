# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the lines of scripts/train/census.py into counts, and a table by hardware."""

from collections import Counter
from collections.abc import Sequence

from scripts.report.records import markdown_table


def count(lines: Sequence[dict], what: str) -> str:
    """what: "cases", or those that start with "stock" Megatron or with "ours"."""
    if what == "cases":
        return str(len(lines))
    return str(sum(line[what] is None for line in lines))


def by_hardware(lines: Sequence[dict]) -> str:
    """A row for each kind of GPU that recipes are for, and one for all of them."""
    rows = []
    kinds = sorted({line["hardware"] for line in lines})
    for name, kind in [*((kind.upper(), kind) for kind in kinds), ("all", None)]:
        found = [line for line in lines if kind in (None, line["hardware"])]
        started = [line for line in found if line["ours"] is None]
        weakened = sum(bool(line["lost"]) for line in started)
        counts = len(found), len(started) - weakened, weakened, len(found) - len(started)
        rows.append([name, *map(str, counts)])
    return markdown_table(["for", "recipes", "as they are", "weakened", "refused"], rows)


def by_verdict(lines: Sequence[dict]) -> str:
    """A row for each way in which a recipe may end, the commonest causes first."""
    started = [line for line in lines if line["ours"] is None]
    weakened = [line for line in started if line["lost"]]
    rows = [
        ["runs as it is", str(len(started) - len(weakened)), ""],
        ["runs, with something switched off", str(len(weakened)), lost(lines)],
        ["is refused", str(len(lines) - len(started)), refused(lines)],
    ]
    return markdown_table(["your recipe", f"of {len(lines)}", "by"], rows, 3)


def lost(lines: Sequence[dict]) -> str:
    """What is switched off in those that run weakened, and in how many."""
    names = Counter(name for line in lines if line["ours"] is None for name in line["lost"])
    return ", ".join(f"`{name}` {count}" for name, count in names.most_common())


def refused(lines: Sequence[dict]) -> str:
    """By which flag, and how many."""
    words = [line["ours"]["by"] for line in lines if line["ours"] is not None]
    names = Counter(f"`{one}`" if one[:2] == "--" else "Megatron's own checks" for one in words)
    return ", ".join(f"{name} {count}" for name, count in names.most_common())
