# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the files that describe clusters, with the fields of Cluster and its parts."""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.planner.cluster import Cluster, Device, Link
from megatron_asynchzp.planner.goodput import Failures

FOLDER = Path(__file__).parent / "clusters"
# These numbers must be above 0; others may be 0.
_ABOVE_0 = (
    "tflops", "memory_gib", "memory_gb_s", "efficiency", "gb_s", "mtbf_hours", "copy_gb_s",
    "save_gb_s",
)  # fmt: skip
# By the type of a field: the table that it holds, and what a value is that is not of it.
_TABLES: dict[Any, type] = {Device: Device, Link: Link, Failures | None: Failures}
_OTHERS: dict[Any, str] = {
    bool: "neither true nor false", str: "not a text", int: "not a whole number of at least 1",
}  # fmt: skip
_CURVE = "is not a list of [bytes, part] with ascending bytes above 0, parts in (0, 1]"


def load_cluster(name_or_file: str) -> Cluster:
    """Return a cluster by its name, in any case, or its file; refuse a file that describes none."""
    path, names = Path(name_or_file), cluster_names()
    name = name_or_file if path.is_file() else name_or_file.lower()
    if name in names:
        path = FOLDER / f"{name}.toml"
    try:
        entries = tomllib.loads(path.read_text())
    except OSError as error:
        near = get_close_matches(name, names, 1)
        fault = "no cluster of that name" if not path.exists() else str(error.strerror)
        fault += f"; the nearest is {near[0]}" if near else ""
        raise ConfigurationError(
            f"{name_or_file}: {fault}; give one of {', '.join(names)}, or a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name_or_file}: not a TOML file: {error}") from error
    return read_cluster(entries, str(path))


def cluster_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_cluster(entries: Mapping[str, Any], file: str) -> Cluster:
    entries = {"name": Path(file).stem, **entries}
    raise_first(_faults_of_table(Cluster, entries, f"{file}: "))
    cluster = _made(Cluster, entries)
    if cluster.device.reserved_gib >= cluster.device.memory_gib:
        raise ConfigurationError(f"{file}: device.reserved_gib: leaves nothing of memory_gib")
    return cluster


def _faults_of_table(kind: type, entries: Any, place: str) -> Iterator[str]:
    """Name entries that make no `kind`; messages put `place` before the name of a field."""
    if not isinstance(entries, dict):
        yield f"{place.rstrip('.')}: is not a table"
        return
    known = {each.name: each for each in fields(kind)}
    for name in entries:
        if name not in known:
            yield f"{place}{name}: is not one of {', '.join(sorted(known))}"
    for name, each in known.items():
        if name in entries:
            yield from _faults_of(name, each.type, entries[name], f"{place}{name}")
        elif each.default is MISSING:
            yield f"{place}{name}: is missing"


def _faults_of(name: str, kind: Any, value: Any, place: str) -> Iterator[str]:
    if kind in _TABLES:
        yield from _faults_of_table(_TABLES[kind], value, f"{place}.")
    elif kind in _OTHERS:
        if type(value) is not kind or (kind is int and value < 1):
            yield f"{place}: {value!r} is {_OTHERS[kind]}"
    elif kind is float:
        low, high = "above 0" if name in _ABOVE_0 else "of at least 0", math.inf
        if name == "efficiency":
            low, high = f"{low} and at most 1", 1.0
        is_finite = type(value) in (int, float) and math.isfinite(value)
        if not (is_finite and 0 <= value <= high and (value or name not in _ABOVE_0)):
            yield f"{place}: {value!r} is not a number {low}"
    elif not _curve(value):
        yield f"{place}: {_CURVE}"


def _made(kind: type, entries: Mapping[str, Any]) -> Any:
    values = {}
    for each in fields(kind):
        if each.name in entries:
            value, wanted = entries[each.name], each.type
            if wanted in _TABLES:
                value = _made(_TABLES[wanted], value)
            elif wanted not in _OTHERS:
                value = float(value) if wanted is float else _curve(value)
            values[each.name] = value
    return kind(**values)


def _curve(pairs: Any) -> tuple[tuple[float, float], ...]:
    """Return the points of an efficiency; none if they make no curve."""
    curve: list[tuple[float, float]] = []
    try:
        for nbytes, part in pairs:
            ascends = nbytes > (curve[-1][0] if curve else 0)
            if not (ascends and 0 < part <= 1 and math.isfinite(nbytes)):
                return ()
            curve.append((float(nbytes), float(part)))
    except (TypeError, ValueError):
        return ()
    return tuple(curve)


def cluster_toml(cluster: Cluster) -> str:
    """Return a file's text that `read_cluster` turns into `cluster`."""
    lines = []
    for each in fields(Cluster):
        value = getattr(cluster, each.name)
        if each.type not in _TABLES:
            lines.append(f"{each.name} = {json.dumps(value, ensure_ascii=False)}")
    named = (each.name for each in fields(Cluster) if each.type in _TABLES)
    for name in filter(lambda name: getattr(cluster, name) is not None, named):
        part = getattr(cluster, name)
        lines += ["", f"[{name}]"]
        lines += [f"{each.name} = {json.dumps(getattr(part, each.name))}" for each in fields(part)]
    return "\n".join([*lines, ""])
