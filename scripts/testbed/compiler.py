# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Finds this machine's C++ compiler and packages that only some processes see, and caches both.

It must not import torch: some of its libraries have to be there before torch is.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


class CompileError(RuntimeError):
    """Why something cannot be compiled here."""


def find_compiler() -> str:
    """The compiler named in CXX, else g++ or c++. Raises CompileError."""
    found = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if found is None:
        raise CompileError("no C++ compiler; install g++ or name one in CXX")
    return found


def run_compiler(compiler: str, arguments: Sequence[str | Path]) -> None:
    """Raises CompileError with the compiler's first error."""
    ended = subprocess.run([compiler, *map(str, arguments)], capture_output=True, text=True)
    if ended.returncode:
        reason = next((line for line in ended.stderr.splitlines() if "error" in line), ended.stderr)
        raise CompileError(f"{compiler} failed: {reason.strip()[:300]}")


def compiled_once(name: str, build: Callable[[Path], None]) -> Path:
    """The file or folder `name` of the cache.

    name: says what it is made of: something of that name is never made again.
    build: makes it at the path that it is given, and may leave other things beside it. It appears
        in the cache at once and complete, for other ranks may build the same.
    Raises CompileError.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = base / "megatron_asynchzp" / name
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            build(fresh := Path(folder) / name)
            try:
                fresh.rename(target)
            except OSError:
                if not target.exists():  # no folder takes the place of one that is there
                    raise
    except OSError as error:
        raise CompileError(f"{error}; name another folder in XDG_CACHE_HOME") from error
    return target


def fetch_package(package: str, version: str, out: Path, *options: str) -> None:
    """The newest release of a minor version from the registry, into a folder of its own.

    options: of uv pip install. Raises CompileError where the registry does not give it.
    """
    if reason := install_into(out, *options, f"{package}=={version}.*"):
        raise CompileError(f"no {package} {version} from the registry: {reason}")


def install_into(out: Path, *words: str) -> str:
    """Install packages without what they need into a folder; return why not, "" where it went.

    words: the packages, and options of uv pip install.
    """
    install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--no-config"]
    command = [*install, "--target", str(out), *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = ended.stderr.strip().splitlines() or ["no reason given"]
    return lines[-1].strip() if ended.returncode else ""
