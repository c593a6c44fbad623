# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Environments that uv makes by a documented install alone."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".versions"
TORCH, NEWEST_TORCH = "2.13.0", "2.15.0"


class Install(NamedTuple):
    """What a page tells a user to install: `pip install ".[EXTRA]"`, beside a torch."""

    extra: str
    torch: str

    @property
    def name(self) -> str:
        """For a folder and a line."""
        return f"install-{self.extra or 'plain'}_torch-{self.torch}"


INSTALLS = [
    Install(extra, torch)
    for torch in (TORCH, NEWEST_TORCH)
    for extra in ("", "hf", "megatron", "quickstart")
]


def commands_of(install: Install, wheel: Path) -> Path:
    """The folder of commands of a new environment, into which `pip install` put what the install
    asks for, and nothing else.

    wheel: this package, from `build_wheel`.
    """
    folder = FOLDER / install.name
    extra = f"[{install.extra}]" if install.extra else ""
    asked = f"megatron_asynchzp{extra} @ {wheel.as_uri()}"
    _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
    _uv("pip", "install", "--quiet", "--python", str(folder), f"torch=={install.torch}", asked)
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


def _uv(*words: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "uv", *words], capture_output=True, text=True)
    assert not ended.returncode, ended.stderr
