# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which record each published table and picture is made from, and how."""

import json
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from scripts.report import (
    census_table,
    checkpoint_table,
    cluster_table,
    compare_front,
    compare_picture,
    compare_table,
    device_table,
    fault_table,
    lanes_picture,
    loss_picture,
    peak_table,
    planner_table,
    scale_table,
    schedule_bars,
    schedule_grid,
    versions_table,
)
from scripts.report.compare_rows import NO_NETWORK, Comparison, comparisons
from scripts.report.loss_picture import RINGS
from scripts.report.parity_table import parity_table
from scripts.report.plot_timeline import write_picture
from scripts.report.records import NotRecorded, Record, read_record

MIB = 2**20
# What nearly all was measured with; docs/results/README.md says so once.
USUAL = {"Python": "3.12.1", "torch": "2.13.0", "megatron-core": "0.19.2"}
_MOST_COMMANDS = 1
_MOST_CHARACTERS = 130
# Tables as text, and their records. What made them is in the history, at the record's tag.
RECORDED = {
    "bit flips": "bit_flips",
    "early update": "early_update",
    "grad wire": "grad_wire",
    "launch orders": "launch_orders",
    "pasa gradient": "pasa_accuracy",
    "pasa training": "pasa_training",
    "pipeline": "pipeline",
}


class Picture(NamedTuple):
    """A PNG of docs/results: draw(record, file) writes it. record: "" where the planner computes
    what it shows. alt, folder: for "picture FILE" in a
    document, what it shows and the folder as seen from there."""

    record: str
    draw: Callable[[Record, Path], None] | None  # None: at the record's tag
    alt: str = ""
    folder: str = ""


# ---- tables: "NAME" in a document's <!-- table: NAME -->; a NAME without an entry here is
# "provenance RECORD"


def _shortened(command: str) -> str:
    """A line of a page; the record has all of a command."""
    if len(command) <= _MOST_CHARACTERS:
        return command
    return command[:_MOST_CHARACTERS].rpartition(" ")[0] + " ..."


def provenance(name: str) -> str:
    """When, on what and with which commands a record was measured: what differs from the usual
    machine, and the first commands of many."""
    record = read_record(name)
    runs = [*record.machines, *(line for line in record.lines if "command" in line)]
    dates = sorted({run["date"] for run in runs})
    parts = [" to ".join(dict.fromkeys((dates[0], dates[-1])))]
    for first in record.machines[:1]:
        found = {"Python": first["python"], **first["versions"]}
        parts += [f"{first['cpus']} cores"] if first["cpus"] != 2 else []
        parts += [f"{name} {it}" for name, it in found.items() if it and it != USUAL.get(name)]
    where = f"{', '.join(parts)}. Record: `docs/results/records/{name}.jsonl`"
    if tags := sorted({run["tag"] for run in runs if "tag" in run}):
        return f"{where}, made at the tag {', '.join(tags)} by the command that it names."
    commands = list(dict.fromkeys(_shortened(run["command"]) for run in runs))
    if more := len(commands[_MOST_COMMANDS:]):
        commands[_MOST_COMMANDS:] = [f"# and {more} more: in the record"]
    return "\n".join([f"{where}, made by", "", "```sh", *commands, "```"])


def parity() -> str:
    """Of each configuration the longest runs."""
    lines = read_record("parity").lines
    steps: dict[tuple, int] = {}
    for line in lines:
        key = line["variant"], line["ranks"]
        steps[key] = max(steps.get(key, 0), line["steps"])
    longest = [line for line in lines if line["steps"] == steps[line["variant"], line["ranks"]]]
    return parity_table(longest)


def host_cost() -> str:
    """The engine beside FSDP2, with the spread of the totals."""
    rows = ["| parameters of a unit | system | forward | backward | both | calls |"]
    rows.append("|---:|---|---:|---:|---:|---:|")
    for line in read_record("host_cost").lines:
        spread = f"{line['fastest_us']:.0f} to {line['slowest_us']:.0f}"
        calls = f"{line['device_calls']:.1f}" if line["device_calls"] else ""
        rows.append(
            f"| {line['params']} | {line['system']} "
            f"| {line['forward_us']:.0f} | {line['backward_us']:.0f} "
            f"| {line['total_us']:.0f} ({spread}) | {calls} |"
        )
    return "\n".join([*rows, "", provenance("host_cost")])


def recorded(name: str, record: str) -> str:
    """The table `name` that a record holds as text, or the only one."""
    tables = [line for line in read_record(record).lines if line.get("kind") == "table"]
    return next(one["markdown"] for one in tables if one.get("name", name) == name)


def quickstart() -> str:
    stock, ours = read_record("quickstart").lines
    rows = [f"| MiB of the fullest rank | {stock['name']} | {ours['name']} |", "|---|---:|---:|"]
    for label, key in (
        ("parameters", "model_param"),
        ("gradients", "main_grad"),
        ("Adam's moments", "optimizer_state"),
    ):
        rows.append(f"| {label} | {state_mib(stock, key)} | {state_mib(ours, key)} |")
    rows += [
        f"| **at rest** | {at_rest_mib(stock)} | {at_rest_mib(ours)} |",
        f"| in flight | {state_mib(stock, RINGS)} | {state_mib(ours, RINGS)} |",
        f"| **together** | {together_mib(stock)} | {together_mib(ours)} |",
    ]
    return "\n".join(rows)


def state_mib(run: dict, *keys: str) -> str:
    return f"{sum(run['state_bytes'][key] for key in keys) / MIB:.2f}"


def at_rest_mib(run: dict) -> str:
    return state_mib(run, *(key for key in run["state_bytes"] if key != RINGS))


def together_mib(run: dict) -> str:
    return state_mib(run, *run["state_bytes"])


@cache
def compared(study: str) -> Comparison:
    """study: a network of the comparison; that of pipelines is "pipelines NETWORK"."""
    network = study.removeprefix("pipelines ")
    record = read_record("compare" if network == study else "compare_pipelines")
    found = {one.profile["name"]: one for one in comparisons(record.lines)}
    if network not in found:
        raise NotRecorded(f"compare {network}")
    return found[network]


def compared_networks() -> str:
    """What was measured without a network beside its step on each network."""
    found = comparisons(read_record("compare").lines)
    return compare_table.networks_table(compared(NO_NETWORK), found)


def _tables_of(study: str) -> dict[str, Callable[[], str]]:
    return {f"compare {study}": lambda: compare_table.measured_table(compared(study))}


def compared_calibrations() -> str:
    return compare_table.calibration_table(comparisons(read_record("compare").lines))


TABLES: dict[str, Callable[[], str]] = {
    "schedules": lambda: schedule_grid.markdown(read_record("schedules").lines),
    "device schedules": lambda: device_table.device_table(read_record("device_schedules").lines),
    "compare calibrations": compared_calibrations,
    "compare networks": compared_networks,
    **_tables_of("pipelines slow-between-nodes"),
    "checkpoints": lambda: checkpoint_table.tables(read_record("checkpoints").lines),
    "parity": parity,
    "host cost": host_cost,
    **{name: partial(recorded, name, record) for name, record in RECORDED.items()},
    "muon": lambda: f"{recorded('muon', 'muon')}\n\n{provenance('muon')}",
    "quickstart": quickstart,
    "planner": lambda: planner_table.markdown(read_record("planner_published").lines),
    "planner misses": lambda: planner_table.misses(read_record("planner_published").lines),
    "planner testbed": lambda: planner_table.testbed(read_record("planner_testbed").lines),
    "peaks": lambda: peak_table.table(read_record("peaks").lines),
    "real size": lambda: peak_table.table(read_record("real_size").lines),
    "recipes": lambda: census_table.by_hardware(read_record("recipes").lines),
    "recipes verdicts": lambda: census_table.by_verdict(read_record("recipes").lines),
    "versions": lambda: versions_table.versions_table(read_record("versions").lines),
    "versions checkpoints": lambda: versions_table.moves_table(read_record("versions").lines),
    "faults lines": lambda: fault_table.ends(read_record("faults").lines, "library"),
    "faults megatron lines": lambda: fault_table.ends(
        read_record("faults").lines, "megatron", is_explained=False
    ),
    "clusters": lambda: cluster_table.table(read_record("clusters").lines),
    "scale": lambda: scale_table.table(read_record("scale").lines),
}


# ---- pictures


def _draw_quickstart(record: Record, file: Path) -> None:
    runs = [
        loss_picture.Run(*(run[key] for key in loss_picture.Run._fields)) for run in record.lines
    ]
    loss_picture.draw(*runs, record.lines[0]["title"], file)


def _draw_timeline(record: Record, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{trace['name']}.json") for trace in record.lines]
        for path, trace in zip(files, record.lines, strict=True):
            events = [
                dict(zip(("cat", "name", "ts", "dur"), event, strict=True)) | {"ph": "X"}
                for event in trace["events"]
            ]
            path.write_text(json.dumps({"traceEvents": events}))
        write_picture(files, file)


PICTURES: dict[str, Picture] = {
    "lanes.png": Picture("", lambda _, file: lanes_picture.draw(file)),
    "quickstart_loss.png": Picture("quickstart", _draw_quickstart),
    "pasa_training.png": Picture(
        "pasa_training",
        None,
        "Loss and gradient errors of a small GPT with biased keys and values: standard flash "
        "attention and PASA in fp16 and bf16, against fp32",
        "results/",
    ),
    "schedules.png": Picture("schedules", lambda r, file: schedule_bars.draw(r.lines, file)),
    "timeline.png": Picture("timeline", _draw_timeline),
    "early_update.png": Picture("early_timeline", _draw_timeline),
    "compare.png": Picture("compare", lambda r, file: compare_picture.draw(r.lines, file)),
    "compare_front.png": Picture("compare", lambda r, file: compare_front.draw(r.lines, file)),
    "scale.png": Picture(
        "scale",
        lambda r, file: scale_table.draw(r.lines, file),
        "Six costs of a start, a step, a save, a load and a failure over 64 to 98,304 ranks, "
        "before and now",
        "results/",
    ),
    "compare_pipelines.png": Picture(
        "compare_pipelines",
        lambda r, file: compare_front.draw(r.lines, file),
        "Step time over peak memory of interleaved pipelines, with the front of those that nothing "
        "beats in both",
    ),
}


def draw_picture(name: str, file: Path) -> None:
    """Raises NotRecorded without a record."""
    picture = PICTURES[name]
    if picture.draw is not None:
        picture.draw(read_record(picture.record) if picture.record else Record([], []), file)


def table(name: str) -> str:
    """Markdown. Raises KeyError for an unknown name, NotRecorded without a record."""
    if name.startswith("picture "):
        file = name.removeprefix("picture ")
        read_record(PICTURES[file].record)
        return f"![{PICTURES[file].alt}]({PICTURES[file].folder}{file})"
    if name.startswith("provenance "):
        return provenance(name.removeprefix("provenance "))
    return TABLES[name]()
