# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a single published figure follows from its record: "KIND; ARGUMENT; ..." names it."""

import re
from collections.abc import Callable
from pathlib import Path

from scripts.report import census_table, compare_table, fault_table, schedule_grid
from scripts.report.compare_rows import NO_NETWORK, Row, ahead
from scripts.report.loss_picture import RINGS
from scripts.report.parity_table import of_full_length
from scripts.report.published import at_rest_mib, compared, state_mib, together_mib
from scripts.report.records import NotRecorded, read_record
from scripts.testbed.cpu_usage import FOREIGN_LIMIT
from scripts.testbed.differences import worst_difference


def _grid(cluster: str) -> schedule_grid.Grid:
    """The first one of a cluster such as "2x2", nodes x ranks of a node."""
    nodes, ranks = cluster.split("x")
    found = schedule_grid.grids(read_record("schedules").lines)
    return next(one for one in found if one.name.startswith(f"{nodes} nodes x {ranks} ranks"))


def schedule_ratio(cluster: str, system: str, column: str) -> str:
    return f"{_grid(cluster).ratio(system, column):.2f}"


def _row(network: str, contender: str) -> Row:
    """contender: its name; "best NAME" is the fastest of those whose name begins with NAME."""
    comparison = compared(network)
    name = contender.removeprefix("best ")
    found = comparison.row(name) if name == contender else comparison.best(name)
    assert found is not None, f"{contender} was not timed on {network}"
    return found


def _warning(*rows: Row) -> str:
    """After a time in which others used so much of the machine that it is too long."""
    return " (disturbed)" if any(row.foreign > FOREIGN_LIMIT for row in rows) else ""


_COMPARED: dict[str, Callable[[Row], str]] = {
    "step": lambda row: f"{row.median_ms:.0f}{_warning(row)}",
    "network": lambda row: f"{_known(row.network_ms):.0f}{_warning(row)}",
    "sent": lambda row: f"{row.node_mb:.1f}",
    "rest": lambda row: f"{row.state_mb:.1f}",
    "peak": lambda row: f"{row.peak_mb:.1f}",
}


def _known(value: float | None) -> float:
    if value is None:
        raise NotRecorded(f"compare {NO_NETWORK}")
    return value


def compare_figure(network: str, contender: str, what: str) -> str:
    return _COMPARED[what](_row(network, contender))


def compare_ahead(network: str, slower: str, faster: str) -> str:
    rows = _row(network, slower), _row(network, faster)
    return f"{ahead(*rows):.2f}{_warning(*rows)}"


def compare_holds(network: str, contender: str, other: str, memory: str) -> str:
    """Return e.g. "7% more": what `contender` holds against `other`, at "rest" or "peak"."""
    of = {"rest": compare_table.state_of, "peak": compare_table.peak_of}[memory]
    more = of(_row(network, contender)) / of(_row(network, other)) - 1
    return f"{100 * abs(more):.0f}% {'more' if more >= 0 else 'less'}"


def quickstart_figure(run: str, what: str) -> str:
    """Return a number of the quickstart.

    `run`: "stock" or "ours"; `what`: "at rest", "in flight" or "together", MiB of the fullest rank,
    or "parameters".
    """
    of_run = read_record("quickstart").lines[("stock", "ours").index(run)]
    if what == "in flight":
        return state_mib(of_run, RINGS)
    if what == "parameters":  # in fp32, of a rank that has all of them
        return f"{of_run['state_bytes']['model_param'] / 4e6:.1f}M"
    return {"at rest": at_rest_mib, "together": together_mib}[what](of_run)


def quickstart_apart() -> str:
    """The largest relative difference between the losses of a step."""
    stock, ours = (run["losses"] for run in read_record("quickstart").lines)
    return f"{worst_difference(ours, stock):.1e}".replace("e-0", "e-")


def quickstart_equal() -> str:
    """Steps whose losses are equal in every printed digit."""
    stock, ours = (run["losses"] for run in read_record("quickstart").lines)
    return str(sum(a == b for a, b in zip(stock, ours, strict=True)))


def parity_worst(precision: str) -> str:
    """The largest difference of a loss or a gradient norm; precision: "fp32" or "half"."""
    errors = [
        max(line["loss_error"], line["grad_norm_error"])
        for line in read_record("parity").lines
        if _is_half(line["variant"]) == (precision == "half")
    ]
    return f"{max(errors):.1e}".replace("e-0", "e-")


def shrunk_worst() -> str:
    """The largest difference of a loss or a norm of the shrunk models."""
    errors = [
        max(value for key, value in line.items() if key.endswith("_error"))
        for line in read_record("shrunk_models").lines
    ]
    return f"{max(errors):.1e}".replace("e-0", "e-")


def parity_count() -> str:
    return str(len(of_full_length(read_record("parity").lines)))


def _is_half(variant: str) -> bool:
    return "bf16" in variant or "fp16" in variant


def published_error(series: str, ranks: str) -> str:
    """Of the predicted point of a series that others measured."""
    (line,) = (
        line
        for line in read_record("planner_published").lines
        if line["kind"] == "published" and not line["fitted"]
        if (line["series"], line["ranks"]) == (series, int(ranks))
    )
    return f"{line['error']:+.1%}"


def published_all(quantity: str) -> str:
    """Return a number about all predicted points that others measured.

    `quantity`: the "mean" or the "worst" error, the number of "sources", or of those that "missed"
    their bounds.
    """
    lines = read_record("planner_published").lines
    sources = [line for line in lines if line["kind"] == "summary"]
    errors = [abs(x["error"]) for x in lines if x["kind"] == "published" and not x["fitted"]]
    if quantity in ("mean", "worst"):
        return f"{sum(errors) / len(errors) if quantity == 'mean' else max(errors):.1%}"
    missed = sum(not source["holds"] for source in sources)
    return str({"missed": missed, "sources": len(sources)}[quantity])


def census_count(what: str) -> str:
    return census_table.count(read_record("census").lines, what)


def recipes_count(what: str) -> str:
    """what: as for census_table.count."""
    return census_table.count(read_record("recipes").lines, what)


def faults_count(program: str, what: str) -> str:
    """Return a number of cells: all, good, or good ones that went on or ended with their lines."""
    lines = read_record("megatron_faults" if program == "megatron" else "faults").lines
    good = fault_table.number_of_good(lines)
    went_on = fault_table.number_that_went_on(lines)
    all_of_them = fault_table.number_of_cells(lines)
    counts = {"good": good, "went on": went_on, "ended": good - went_on, "cells": all_of_them}
    return str(counts[what])


def stated(file: str, text: str) -> str:
    """`text`, where `file`, a test or a script that holds or sets the figure, has it as well."""
    source = (Path(__file__).parents[2] / file).read_text()
    if not re.search(rf"(?<![\w.])(?<!e-){re.escape(text)}(?!\w|%|\.\d)", source):
        raise LookupError(f"{file} does not have {text}")
    return text


def recorded(record: str, name: str) -> str:
    """The figure that a record holds as text: what made it is in the history, at its commit."""
    lines = read_record(record).lines
    figures = [line for line in lines if line.get("kind") == "figure"]
    return next(line["text"] for line in figures if line["name"] == name)


FIGURES: dict[str, Callable[..., str]] = {
    "faults": faults_count,
    "step": schedule_ratio,
    "compare": compare_figure,
    "compare ahead": compare_ahead,
    "compare holds": compare_holds,
    "quickstart": quickstart_figure,
    "quickstart apart": quickstart_apart,
    "quickstart equal": quickstart_equal,
    "parity worst": parity_worst,
    "shrunk worst": shrunk_worst,
    "parity count": parity_count,
    "published": published_error,
    "published all": published_all,
    "census": census_count,
    "recipes": recipes_count,
    "stated": stated,
    "recorded": recorded,
}


# Of kinds whose first word is not the name of their record.
_RECORDS = {"step": "schedules", "published": "planner_published", "shrunk": "shrunk_models"}


def record_of(name: str) -> str | None:
    """The record that a figure is made from; None for what a test or a script sets."""
    kind, *arguments = name.split("; ")
    if kind in ("recorded", "stated"):
        place = Path(arguments[0])
        return place.stem if kind == "recorded" or place.suffix == ".jsonl" else None
    if kind.startswith("compare") and arguments[0].startswith("pipelines "):
        return "compare_pipelines"
    return _RECORDS.get(kind.split()[0], kind.split()[0])


def figure(name: str) -> str:
    """Raises KeyError for a kind that is not known, NotRecorded without a record."""
    kind, *arguments = name.split("; ")
    return FIGURES[kind](*arguments)
