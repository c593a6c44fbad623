# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a record states about where it was measured: machine, versions, command."""

import os
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version


def machine() -> dict[str, str | int | None]:
    """Kind of processor, number of cores, Python, and the command that was given."""
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "command": command(),
    }


def machine_record(command_line: str | None = None) -> dict:
    """The first line of a file of records. command_line: of a script that is not Python's; else the
    command of this process."""
    record = {"kind": "machine", "date": time.strftime("%Y-%m-%d")} | machine()
    if command_line is not None:
        record["command"] = command_line
    return record | {"versions": versions("torch", "megatron-core", "deepspeed")}


def versions(*packages: str) -> dict[str, str | None]:
    """None for a package that is not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def command() -> str:
    """The command of this process; a module by its name, without the path of its file."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join(["python", *start, *sys.argv[1:]])
