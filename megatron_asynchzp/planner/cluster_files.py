# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the files that describe clusters, with the fields of Cluster and its parts."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner.cluster import Cluster, Device, Link
from megatron_asynchzp.planner.goodput import Failures

FOLDER = Path(__file__).parent / "clusters"
# These numbers must be above 0; others may be 0.
_ABOVE_0 = (
    "tflops", "memory_gib", "memory_gb_s", "efficiency", "gb_s", "mtbf_hours", "copy_gb_s",
    "save_gb_s",
)  # fmt: skip
_TABLES = {Device: Device, Link: Link, Failures | None: Failures}  # by the type of a field
_CURVE = "is not a list of [bytes, part] with ascending bytes above 0, parts in (0, 1]"


def load_cluster(name_or_file: str) -> Cluster:
    """Return a cluster by its name, in any case, or its file.

    Raises:
        ConfigurationError: The file describes no cluster.
    """
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
    cluster = _read(Cluster, {"name": Path(file).stem, **entries}, f"{file}: ")
    if cluster.device.reserved_gib >= cluster.device.memory_gib:
        raise ConfigurationError(f"{file}: device.reserved_gib: leaves nothing of memory_gib")
    return cluster


def _read(kind: type, entries: Any, place: str) -> Any:
    """Build a `kind` from these entries; messages put `place` before the name of a field."""
    if not isinstance(entries, dict):
        raise ConfigurationError(f"{place.rstrip('.')}: is not a table")
    known = {each.name: each for each in fields(kind)}
    for name in entries:
        if name not in known:
            raise ConfigurationError(f"{place}{name}: is not one of {', '.join(sorted(known))}")
    values = {}
    for name, each in known.items():
        if name in entries:
            values[name] = _value(name, each.type, entries[name], f"{place}{name}")
        elif each.default is MISSING:
            raise ConfigurationError(f"{place}{name}: is missing")
    return kind(**values)


def _value(name: str, kind: Any, value: Any, place: str) -> Any:
    if kind in _TABLES:
        return _read(_TABLES[kind], value, f"{place}.")
    if kind is bool and not isinstance(value, bool):
        raise ConfigurationError(f"{place}: {value!r} is neither true nor false")
    if kind is str and not isinstance(value, str):
        raise ConfigurationError(f"{place}: {value!r} is not a text")
    if kind is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigurationError(f"{place}: {value!r} is not a whole number of at least 1")
    if kind is float:
        low, high = "above 0" if name in _ABOVE_0 else "of at least 0", math.inf
        if name == "efficiency":
            low, high = f"{low} and at most 1", 1.0
        number = math.nan  # if `value` is no number
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        is_low = number < 0 or (name in _ABOVE_0 and number == 0)
        if not math.isfinite(number) or is_low or number > high:
            raise ConfigurationError(f"{place}: {value!r} is not a number {low}")
        return number
    return value if kind in (bool, str, int) else _curve(value, place)


def _curve(pairs: Any, place: str) -> tuple[tuple[float, float], ...]:
    curve: list[tuple[float, float]] = []
    try:
        for nbytes, part in pairs:
            ascends = nbytes > (curve[-1][0] if curve else 0)
            if not (ascends and 0 < part <= 1 and math.isfinite(nbytes)):
                raise ValueError
            curve.append((float(nbytes), float(part)))
    except (TypeError, ValueError):
        curve = []
    if not curve:
        raise ConfigurationError(f"{place}: {_CURVE}")
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
