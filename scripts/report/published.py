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
    compare_front,
    compare_table,
    device_table,
    fault_table,
    lanes_picture,
    long_training,
    loss_picture,
    planner_table,
    schedule_grid,
)
from scripts.report.compare_rows import NO_NETWORK, Comparison, comparisons
from scripts.report.loss_picture import RINGS
from scripts.report.parity_table import of_full_length, parity_table
from scripts.report.plot_timeline import write_picture
from scripts.report.records import NotRecorded, Record, markdown_table, read_record

MIB = 2**20
# What nearly all was measured with; docs/results/README.md says so once.
USUAL = {"Python": "3.12.1", "torch": "2.13.0", "megatron-core": "0.19.2"}
_MOST_CHARACTERS = 130
# Tables as text, and their records. What made them is in the history, at the record's commit.
RECORDED = {
    "bit flips": "bit_flips",
    "checkpoints": "checkpoints",
    "early update": "early_update",
    "grad wire": "grad_wire",
    "graph host cost": "graph_host_cost",
    "host cost": "host_cost",
    "muon": "muon",
    "offload": "offload",
    "overlap": "overlap",
    "pasa gradient": "pasa_accuracy",
    "pasa training": "pasa_training",
    "peaks": "peaks",
    "planner testbed": "planner_testbed",
    "scale": "scale",
    "sub samples": "sub_samples",
    "versions": "versions",
    "versions checkpoints": "versions",
}


class Table(NamedTuple):
    """A table. markdown(lines) makes it of a record's lines."""

    record: str
    markdown: Callable[[list[dict]], str]


class Picture(NamedTuple):
    """A PNG of docs/results, which draw(record, file) writes."""

    record: str
    draw: Callable[[Record, Path], None] | None  # None: at the record's commit


# ---- tables: "NAME" in a document's <!-- table: NAME -->; a NAME without an entry here is
# "provenance RECORD"


def _shortened(command: str) -> str:
    """A line of a page; the record has all of a command."""
    if len(command) <= _MOST_CHARACTERS:
        return command
    return command[:_MOST_CHARACTERS].rpartition(" ")[0] + " ..."


def provenance(name: str) -> str:
    """Say when, on what machine and with which command a record was measured."""
    record = read_record(name)
    runs = [*record.machines, *(line for line in record.lines if "command" in line)]
    dates = sorted({run["date"] for run in runs})
    parts = [" to ".join(dict.fromkeys((dates[0], dates[-1])))]
    for first in record.machines[:1]:
        found = {"Python": first["python"], **first["versions"]}
        parts += [f"{first['cpus']} cores"] if first["cpus"] != 2 else []
        parts += [f"{name} {it}" for name, it in found.items() if it and it != USUAL.get(name)]
    at = dict.fromkeys(run["measured_commit"] for run in runs if "measured_commit" in run)
    parts += [f"commit {' and '.join(at)}"] if at else []
    if commits := sorted({run["commit"] for run in runs if "commit" in run}):
        made = f"at commit {', '.join(commits)}"
    else:
        commands = list(dict.fromkeys(_shortened(run["command"]) for run in runs))
        made = f"`{commands[0]}`" + (f" and {more} more" if (more := len(commands) - 1) else "")
    return f"Measured {', '.join(parts)}: {made}. Record: `docs/results/records/{name}.jsonl`."


def _parity(lines: list[dict]) -> str:
    return parity_table(of_full_length(lines))


def _recorded(name: str, lines: list[dict]) -> str:
    """The table `name` that a record holds as text, or the only one."""
    tables = [line for line in lines if line.get("kind") == "table"]
    return next(one["markdown"] for one in tables if one.get("name", name) == name)


def _quickstart(lines: list[dict]) -> str:
    stock, ours = lines
    head = ["MiB of the fullest rank", stock["name"], ours["name"]]
    rows: dict[str, Callable[[dict], str]] = {
        "parameters": lambda run: state_mib(run, "model_param"),
        "gradients": lambda run: state_mib(run, "main_grad"),
        "Adam's moments": lambda run: state_mib(run, "optimizer_state"),
        "**at rest**": at_rest_mib,
        "in flight": lambda run: state_mib(run, RINGS),
        "**together**": together_mib,
    }
    return markdown_table(head, [[name, of(stock), of(ours)] for name, of in rows.items()])


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
    return _on(network, read_record("compare" if network == study else "compare_pipelines").lines)


def _on(network: str, lines: list[dict]) -> Comparison:
    found = {one.profile["name"]: one for one in comparisons(lines)}
    if network not in found:
        raise NotRecorded(f"compare {network}")
    return found[network]


def _on_networks(lines: list[dict]) -> str:
    """Compare steps without a network with those on each network."""
    return compare_table.networks_table(_on(NO_NETWORK, lines), comparisons(lines))


TABLES: dict[str, Table] = {
    "schedules": Table("schedules", schedule_grid.markdown),
    "device schedules": Table("device_schedules", device_table.device_table),
    "compare": Table("compare", compare_table.markdown),
    "compare networks": Table("compare", _on_networks),
    "compare pipelines slow-between-nodes": Table(
        "compare_pipelines",
        lambda lines: compare_table.measured_table(_on("slow-between-nodes", lines)),
    ),
    "parity": Table("parity", _parity),
    **{name: Table(record, partial(_recorded, name)) for name, record in RECORDED.items()},
    "quickstart": Table("quickstart", _quickstart),
    "long training": Table("long_training", long_training.markdown),
    "planner": Table("planner_published", planner_table.markdown),
    "planner misses": Table("planner_published", planner_table.misses),
    "recipes verdicts": Table("recipes", census_table.by_verdict),
    "faults lines": Table("faults", fault_table.ends),
}


# ---- pictures


def _draw_quickstart(record: Record, file: Path) -> None:
    runs = [
        loss_picture.Run(*(run[key] for key in loss_picture.Run._fields)) for run in record.lines
    ]
    loss_picture.draw(*runs, record.lines[0]["title"], file)  # pyright: ignore[reportCallIssue]


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
    "long_training.png": Picture(
        "long_training", lambda r, file: long_training.draw(r.lines, file)
    ),
    "pasa_training.png": Picture("pasa_training", None),
    "timeline.png": Picture("timeline", _draw_timeline),
    "early_update.png": Picture("early_timeline", _draw_timeline),
    "compare_front.png": Picture("compare", lambda r, file: compare_front.draw(r.lines, file)),
}


def draw_picture(name: str, file: Path) -> None:
    """Raises NotRecorded without a record."""
    picture = PICTURES[name]
    if picture.draw is not None:
        picture.draw(read_record(picture.record) if picture.record else Record([], []), file)


def record_of(name: str) -> str:
    """The record that a table is made from."""
    kind, _, argument = name.partition(" ")
    return argument if kind == "provenance" else TABLES[name].record


def table(name: str) -> str:
    """Markdown. Raises KeyError for an unknown name, NotRecorded without a record."""
    if name.startswith("provenance "):
        return provenance(name.removeprefix("provenance "))
    return TABLES[name].markdown(read_record(TABLES[name].record).lines)
