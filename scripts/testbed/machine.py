# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a record states about where it was measured: machine, versions, command."""

import os
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "megatron-core", "deepspeed")


def machine_record(command_line: str | None = None) -> dict:
    """Return the first line of a file of records.

    It has date, kind of processor, number of cores, Python, and versions (None for a package that
    is not installed). `command_line`: of a script that is not Python's; else the command of this
    process.
    """
    return {
        "kind": "machine",
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "command": command() if command_line is None else command_line,
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return None


def command() -> str:
    """The command of this process; a module by its name, without the path of its file."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join(["python", *start, *sys.argv[1:]])
