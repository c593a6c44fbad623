# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs pytest on a copy of the tree in a process that was forked from one with torch and Megatron
imported, and forks the server of its ranks from that process too: to import them takes longer than
most tests.
"""

import importlib
import os
import sys
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType
from typing import Any

# Modules that the warm server imports; none of them is the project's.
PRELOADED = ("torch", "torch.distributed", "pytest", "hypothesis", "megatron.training")
_OURS = ("tests", "scripts", "megatron_asynchzp")


def main(tree: Path, bytecode: Path, log: Path, words: list[str]) -> None:
    """Run pytest with these words in `tree`, as a process of its own; ends with its status."""
    os.setsid()  # its ranks end with it
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    root = str(Path(__file__).parents[2])
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", root, str(tree)))]
    # What it starts as new interpreters compiles torch once for all mutants.
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": str(bytecode)}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.chdir(tree)
    sys.argv[:] = ["pytest"]
    sys.modules["__main__"] = ModuleType("__main__")  # ranks would import the starter's
    _start_server_of_ranks()
    import pytest

    status = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *words])
    sys.stdout.flush()
    os._exit(int(status))


def _start_server_of_ranks() -> None:
    """Fork the server that multiprocessing would start as a new interpreter."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = server._forkserver_alive_fd = None
    server._forkserver_pid = server._inherited_fds = None
    spawn = util.spawnv_passfds

    def fork(path: bytes, words: list[str], descriptors: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                exec(words[-1], {})
            finally:
                os._exit(1)
        return pid

    importlib.import_module("tests.conftest")  # says what the server imports
    util.spawnv_passfds = fork
    try:
        server.ensure_running()
    finally:
        util.spawnv_passfds = spawn
