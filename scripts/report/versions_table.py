# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the records of ./scripts/test_versions.sh into a Markdown table."""

from collections.abc import Sequence

from scripts.report.records import markdown_table

_HEAD = ["torch", "megatron-core", "Python", "transformers", "result", "date"]


def versions_table(lines: Sequence[dict]) -> str:
    """A row for each combination, those with one result together; of two tests the last."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        if line.get("kind") == "cell":
            key = tuple(line["cell"].values())
            rows.pop(key, None)
            rows[key] = [*key, _result(line), line["date"]]
    shared: dict[tuple[str, ...], list[str]] = {}  # rows that differ in torch alone
    for torch, *rest in rows.values():
        shared.setdefault(tuple(rest), []).append(torch)
    cells = [[", ".join(versions), *rest] for rest, versions in shared.items()]
    return markdown_table(_HEAD, cells, num_left=6)


def moves_table(lines: Sequence[dict]) -> str:
    """Checkpoints: where all loaded alike, how many; else a row for each place where one was
    written, a column for each that loaded it."""
    results = [_moved(one) for one in _moves(lines)]
    if len(set(results)) == 1:
        places = dict.fromkeys(_place(one["written"]) for one in _moves(lines))
        return f"{len(results)} of {len(results)} loads: {results[0]}. Between {'; '.join(places)}."
    cells = {(_place(one["written"]), _place(one["loaded"])): _moved(one) for one in _moves(lines)}
    places = list(dict.fromkeys(written for written, _ in cells))
    rows = [[here, *(cells.get((here, there), "") for there in places)] for here in places]
    return markdown_table(
        ["written beside torch, megatron-core, Python", *places], rows, num_left=len(places) + 1
    )


def _moves(lines: Sequence[dict]) -> list[dict]:
    return [line for line in lines if line.get("kind") == "move"]


def _place(cell: dict) -> str:
    return f"{cell['torch']}, {cell['megatron']}, {cell['python']}"


def _moved(line: dict) -> str:
    if "reason" in line:
        return line["reason"]
    if line["differing"]:
        return f"{len(line['differing'])} of {line['tensors']} tensors differ"
    error = line["loss_error"]
    return f"same bits, losses {'too' if not error else f'to {error:.0e}'}"


def _result(line: dict) -> str:
    if "reason" in line:
        return f"not run: {line['reason'].removeprefix('error: ').partition(' in ')[0]}"
    if not line["failed"]:
        return f"{line['passed']} passed"
    return f"{line['passed']} passed, {len(line['failed'])} failed: {', '.join(line['failed'])}"
