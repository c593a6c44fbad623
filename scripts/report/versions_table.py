# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the records of ./scripts/test_versions.sh into a Markdown table."""

from collections.abc import Sequence

from scripts.report.records import markdown_table, print_table

_HEAD = ["torch", "megatron-core", "Python", "transformers", "result", "date"]


def versions_table(lines: Sequence[dict]) -> str:
    """A row for each combination; of one that was tested twice, the last."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        if line.get("kind") == "cell":
            key = (line["torch"], line["megatron"], line["python"], line["transformers"])
            rows.pop(key, None)
            rows[key] = [*key, _result(line), line["date"]]
    return markdown_table(_HEAD, list(rows.values()), num_left=6)


def _result(line: dict) -> str:
    if "reason" in line:
        return line["reason"]
    if not line["failed"]:
        return f"{line['passed']} passed"
    return f"{line['passed']} passed, {len(line['failed'])} failed: {', '.join(line['failed'])}"


if __name__ == "__main__":
    print_table("versions_table", "scripts.versions", versions_table)
