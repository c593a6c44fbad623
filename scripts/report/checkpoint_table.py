# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of bench_checkpoints.py, of one or more runs, into Markdown tables.

python -m scripts.report.checkpoint_table runs/checkpoints.jsonl
"""

import statistics

from scripts.report.records import markdown_table, print_table

LIMIT = 1.1
LATER_SAVE, LOAD = "later save", "load"
ACTS = ("first save", LATER_SAVE, "cold load", LOAD)
_PARTS = {
    LATER_SAVE: ("prepare_directory", "complete_directory", "name_main_params"),
    "cold load": ("choose_checkpoint", "refuse_another_model"),
    LOAD: ("choose_checkpoint", "refuse_another_model"),
}
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
    return "\n".join([_times(runs, records), _memory(runs), _parts(runs), _ratios(runs)])


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
    title = (
        "MiB of the largest rank, median: resident beyond what it has at rest; tensors beyond "
        "rest; tensors at the highest, those at rest included (the smallest of the repetitions: "
        "what an earlier contender left in the process counts there)."
    )
    keys = ("resident_nbytes", "tensor_nbytes", "total_nbytes")
    rows = [
        [name, *(_mib(acts[act], key) for act in (LATER_SAVE, LOAD) for key in keys)]
        for name, acts in runs.items()
    ]
    kinds = ("resident beyond rest", "tensors beyond rest", "tensors in all")
    columns = [f"{act}: {kind}" for act in ("save", "load") for kind in kinds]
    return f"{title}\n\n{markdown_table(['contender', *columns], rows)}"


def _mib(acts: list[dict], key: str) -> str:
    return "?" if acts[0][key] is None else f"{_typical(acts, key) / _MIB:.0f}"


def _typical(acts: list[dict], key: str) -> float:
    return min(act[key] for act in acts) if key == "total_nbytes" else _median(acts, key)


def _median(acts: list[dict], key: str) -> float:
    return statistics.median(act[key] for act in acts)


def _parts(runs: dict) -> str:
    rows = []
    for name, acts in runs.items():
        for act, parts in _PARTS.items():
            timed = [part for part in parts if part in acts[act][0]["parts_s"]]
            if timed:
                medians = [
                    f"{part} {statistics.median(one['parts_s'][part] for one in acts[act]):.3f}"
                    for part in timed
                ]
                rows.append([name, act, f"{_median(acts[act], 'seconds'):.2f}", "; ".join(medians)])
    title = "What of it is ours (rank 0, median; name_main_params is a part of complete_directory)."
    return f"{title}\n\n{markdown_table(['contender', 'act', 'seconds', 'of that'], rows)}"


def _ratios(runs: dict) -> str:
    """Each contender of ours over each of stock, by medians; bold above the limit."""
    values = [(act, "seconds", "seconds") for act in ACTS]
    values += [(act, "resident beyond rest", "resident_nbytes") for act in (LATER_SAVE, LOAD)]
    if runs[next(iter(runs))][LOAD][0]["total_nbytes"] is not None:
        values += [(act, "tensors in all", "total_nbytes") for act in (LATER_SAVE, LOAD)]
    stock = [name for name in runs if name.startswith("stock")]
    rows = [
        [name, f"{act}, {what}", *(_ratio(acts[act], runs[other][act], key) for other in stock)]
        for name, acts in runs.items()
        if name not in stock
        for act, what, key in values
    ]
    title = f"Ratio of medians (of minima in brackets); bold is above {LIMIT}."
    return f"{title}\n\n{markdown_table(['ours', 'line', *stock], rows)}"


def _ratio(our_acts: list[dict], stock_acts: list[dict], key: str) -> str:
    """By medians; of seconds also by minima, which the load of others touches least."""
    if _typical(stock_acts, key) <= 0:
        return "-"
    ratio = _typical(our_acts, key) / _typical(stock_acts, key)
    found = f"**{ratio:.2f}**" if ratio > LIMIT else f"{ratio:.2f}"
    if key != "seconds":
        return found
    ours, stock = (min(act[key] for act in acts) for acts in (our_acts, stock_acts))
    return f"{found} ({ours / stock:.2f})"


if __name__ == "__main__":
    print_table("checkpoint_table", "scripts.bench.bench_checkpoints", tables)
