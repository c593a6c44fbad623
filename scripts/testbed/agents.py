# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes of one job as agents of torchrun on this machine, which can be lost and come back. Knows
no script.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripts.testbed import ranks

_ROOT = Path(__file__).parents[2]
# The store of the rendezvous, which outlives every node.
_STORE = (
    "import sys, threading, torch.distributed as dist; "
    "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, wait_for_workers=False); "
    "print('ready', flush=True); threading.Event().wait()"
)


class Nodes:
    """The nodes of one job, by name; each has two ranks."""

    def __init__(self, folder: Path, options: list[str], words: list[str], **env: str):
        """words: what torchrun runs; {node} stands for the node's name. options: of torchrun,
        beside those of the rendezvous."""
        self._folder, self._words, self._agents = folder, words, dict[str, subprocess.Popen]()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._env = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        self._env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | env
        port = ranks.free_port()
        self._options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--local-addr"]
        self._options += ["127.0.0.1", "--rdzv-endpoint", f"127.0.0.1:{port}", *options]
        self._store = subprocess.Popen(
            [sys.executable, "-c", _STORE, str(port)], stdout=subprocess.PIPE, env=self._env
        )
        assert self._store.stdout is not None
        self._store.stdout.readline()

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_) -> None:
        for name in list(self._agents):
            self.lose(name)
        self._store.kill()
        self._store.wait()

    def start(self, name: str) -> None:
        """A node that was not there, or that was lost, comes."""
        words = [word.replace("{node}", name) for word in self._words]
        command = [sys.executable, "-m", "megatron_asynchzp.torchrun", *self._options, *words]
        kind, _, mark = self._mark(name).partition("=")
        env = self._env | {kind: mark}
        with self.log(name).open("ab") as out:
            self._agents[name] = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=self._folder, env=env, start_new_session=True
            )

    def lose(self, name: str) -> None:
        """All processes of a node end at once."""
        agent = self._agents.pop(name)
        while found := _processes_with(self._mark(name)):
            for process in found:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            agent.poll()

    def _mark(self, name: str) -> str:
        return f"NODE={self._folder / name}"

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def end(self, timeout_s: float) -> list[int]:
        """The status of each node that is there, when it has ended."""
        deadline = time.monotonic() + timeout_s
        return [one.wait(deadline - time.monotonic()) for one in self._agents.values()]

    def await_that(self, is_so: Callable[[], bool], timeout_s: float = 150.0) -> None:
        """Return when `is_so`; raises where that takes too long, or a node has ended before."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            is_running = all(one.poll() is None for one in self._agents.values())
            if not is_running or time.monotonic() > deadline:
                raise AssertionError(
                    "\n".join(self.log(n).read_text()[-6000:] for n in self._agents)
                )
            time.sleep(0.05)


def _processes_with(word: str) -> list[int]:
    """Those that have `word` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            pass  # it has ended, or is another user's
    return found
