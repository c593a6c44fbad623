# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Environments that uv makes: for a cell, made once and kept, and by a documented install alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.versions.cells import Cell, Install

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".versions"
_STAMP = "complete"
# What the tests need beside what is tested.
_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "packaging", "rich", "safetensors", "einops")


class NoEnvironment(Exception):
    """The environment of a cell cannot be made; the message is uv's last lines."""


def python_of(cell: Cell) -> Path:
    """The interpreter of the cell's environment, which is made where it is missing.

    Raises NoEnvironment.
    """
    folder = FOLDER / cell.name
    python = folder / "bin" / "python"
    wanted = "\n".join([*cell.requirements, *_TOOLS])
    stamp = folder / _STAMP
    if not (stamp.is_file() and stamp.read_text() == wanted):
        # The package itself is found by PYTHONPATH: an editable install would leave files here.
        _make(folder, _interpreter(cell.python), *cell.requirements, *_TOOLS)
        stamp.write_text(wanted)
    return python


def commands_of(install: Install, wheel: Path) -> Path:
    """The folder of commands of a new environment, into which `pip install` put what the install
    asks for, and nothing else.

    wheel: this package, from `build_wheel`. Raises NoEnvironment.
    """
    folder = FOLDER / install.name
    extra = f"[{install.extra}]" if install.extra else ""
    asked = f"megatron_asynchzp{extra} @ {wheel.as_uri()}"
    _make(folder, sys.executable, f"torch=={install.torch}", asked)
    return folder / "bin"


def build_wheel(folder: Path) -> Path:
    """The wheel of this package in `folder`, built in a copy of what it is made of, without a
    network."""
    source = folder / "source"
    shutil.copytree(
        ROOT / "megatron_asynchzp",
        source / "megatron_asynchzp",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def _make(folder: Path, interpreter: str, *requirements: str) -> None:
    _uv("venv", "--quiet", "--clear", "--python", interpreter, str(folder))
    _uv("pip", "install", "--quiet", "--python", str(folder), *requirements)


def _interpreter(version: str) -> str:
    """Of `version`, such as "3.13": this one, one of pyenv, or what uv finds on this machine."""
    if ".".join(map(str, sys.version_info[:2])) == version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return next(map(str, pyenv.glob(f"versions/{version}*/bin/python")), version)


def environment_of(cell: Cell) -> dict[str, str]:
    """The variables of a process that runs in it."""
    # Bytecode of its own: two environments have other files of one name and date.
    bytecode = str(FOLDER / "bytecode" / cell.name)
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": bytecode}


def replaced_by_install(cell: Cell, python: Path) -> list[str]:
    """What an install of this package would remove from the environment of the cell, by the
    resolver's dry run, as "torch==2.15.0". An install must only add.

    Raises NoEnvironment.
    """
    extras = [word for extra in cell.extras for word in ("--extra", extra)]
    said = _uv(
        "pip", "install", "--dry-run", "--python", str(python), "-r", "pyproject.toml", *extras
    )
    return re.findall(r"^ - (\S+)", said, re.MULTILINE)


def _uv(*words: str) -> str:
    command = [sys.executable, "-m", "uv", "--no-python-downloads", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise NoEnvironment(" ".join(ended.stderr.split())[-500:])
    return ended.stderr
