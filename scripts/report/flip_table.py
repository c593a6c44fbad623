# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the record of scripts.bench.bit_flips into a table."""

from collections.abc import Sequence

from scripts.report.records import markdown_table

_CHECKS = (("replicas", "replicas"), ("not_finite", "NaN"), ("large", "large"))


def flip_table(lines: Sequence[dict]) -> str:
    """A row for each place and sizes, a column for each bit: the checks that notice it, each with
    the steps that this takes, and the rerun machine with its verdict and the statuses of the runs;
    where none does, how far the losses are from the undisturbed ones."""
    bits = list(dict.fromkeys(line["bit"] for line in lines))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines:
        sizes = "({})".format(", ".join(map(str, line["sizes"])))
        rows.setdefault((sizes, line["place"]), {})[line["bit"]] = _cell(line)
    return markdown_table(
        ["sizes", "place", *bits],
        [[*key, *(cells.get(bit, "") for bit in bits)] for key, cells in rows.items()],
        num_left=2,
    )


def _cell(line: dict) -> str:
    found = [f"{name} {line[key]}" for key, name in _CHECKS if line[key] is not None]
    if rerun := line.get("rerun"):
        statuses = " ".join(map(str, rerun["status"]))
        said = f"{rerun['steps']}: {rerun['said']}" if rerun["said"] else "none"
        found.append(f"rerun {said} ({statuses})")
    if found:
        return ", ".join(found)
    return "none; no loss changes" if not line["loss_apart"] else f"none; {line['loss_apart']:.0e}"
