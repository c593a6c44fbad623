# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of bench_checkpoints.py, of one or more runs, into Markdown tables."""

import statistics

from scripts.report.records import markdown_table

LATER_SAVE, LOAD = "later save", "load"
ACTS = ("first save", LATER_SAVE, "cold load", LOAD)
_MIB = 1 << 20


def gathered(records: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """Contender -> act -> its repetitions; every save but the first is a later save, and the loads
    that find the files in the page cache are alike."""
    kinds = {"save": LATER_SAVE, "load": LOAD}
    found: dict[str, dict[str, list[dict]]] = {}
    for record in records:
        acts = found.setdefault(record["contender"], {})
        for name, act in record["acts"].items():
            acts.setdefault(kinds.get(name.split()[0], name), []).append(act)
    return found


def tables(records: list[dict]) -> str:
    runs = gathered(records)
    return "\n".join([_times(runs, records), _memory(runs)])


def _times(runs: dict, records: list[dict]) -> str:
    nbytes = {record["contender"]: record["disk_nbytes"] for record in records}
    foreign = statistics.median(
        one["foreign_cpu"] for acts in runs.values() for one in acts[LATER_SAVE]
    )
    title = (
        f"Seconds, median (min to max) of {len(records) // len(runs)} repetitions; in later saves "
        f"others used {foreign:.0%} of the machine (median; with what the kernel writes for us)."
    )
    rows = [
        [name, *(_spread(acts[act], "seconds") for act in ACTS), f"{nbytes[name] / _MIB:.0f}"]
        for name, acts in runs.items()
    ]
    return f"{title}\n\n{markdown_table(['contender', *ACTS, 'MiB on disk'], rows)}"


def _spread(acts: list[dict], key: str) -> str:
    values = [act[key] for act in acts]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _memory(runs: dict) -> str:
    title = "MiB of the largest rank's tensors beyond those at rest (median)."
    rows = [
        [name, *(_mib(acts[act], "tensor_nbytes") for act in (LATER_SAVE, LOAD))]
        for name, acts in runs.items()
    ]
    return f"{title}\n\n{markdown_table(['contender', 'save', 'load'], rows)}"


def _mib(acts: list[dict], key: str) -> str:
    return "?" if acts[0][key] is None else f"{_median(acts, key) / _MIB:.0f}"


def _median(acts: list[dict], key: str) -> float:
    return statistics.median(act[key] for act in acts)
