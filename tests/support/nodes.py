# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes of one job as agents of torchrun on this machine, which can be lost and come back. All of
them have its network, or each has its own, with a link between them (links.py). Knows no script.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripts.testbed import ranks
from scripts.testbed.links import address, unshare

_ROOT = Path(__file__).parents[2]
# The store of the rendezvous, which outlives every node.
_STORE = (
    "import sys, threading, torch.distributed as dist; "
    "store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False); "
    "print('ready', flush=True); threading.Event().wait()"
)
_LINKS = (
    "import sys, threading; from scripts.testbed.links import Links; "
    "Links(int(sys.argv[1]), sys.argv[2]); print('ready', flush=True); threading.Event().wait()"
)


class Nodes:
    """The nodes of one job, by name; each has two ranks."""

    def __init__(
        self,
        folder: Path,
        options: list[str],
        words: list[str],
        names: tuple[str, ...] = (),
        inter: str | None = None,
        **env: str,
    ):
        """words: what torchrun runs; {node} stands for the node's name. options: of torchrun,
        beside those of the rendezvous. inter: the rate of each node's link, such as 1gbit; then
        `names` are all nodes, and the store of the rendezvous is on one more. For root."""
        self._folder, self._words, self._agents = folder, words, dict[str, subprocess.Popen]()
        self._names, self._links = names, None
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._env = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        self._env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0" if inter else "lo"} | env
        if inter is not None:
            self._links = self._serve(*unshare(), *_python(_LINKS, len(names) + 1, inter))
        place, port = self._address(len(names)), ranks.free_port()
        self._options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        self._options += ["--rdzv-endpoint", f"{place}:{port}", *options]
        self._store = self._serve(*self._enter(len(names)), *_python(_STORE, place, port))

    def _serve(self, *command: str) -> subprocess.Popen:
        """A process that has said that it is ready."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=self._env)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"{command} ended with {process.wait()}")
        return process

    def _address(self, node: int) -> str:
        return "127.0.0.1" if self._links is None else address(node)

    def _enter(self, node: int) -> list[str]:
        """The words before a command that runs in the network of `node`."""
        if self._links is None:
            return []
        pid = self._links.pid
        inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        return ["nsenter", f"--net=/proc/{inside}/root/run/netns/node{node}"]

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_) -> None:
        for name in list(self._agents):
            self.lose(name)
        for process in (self._store, self._links):
            if process is not None:
                process.kill()
                process.wait()

    def start(self, name: str) -> None:
        """A node that was not there, or that was lost, comes."""
        words = [word.replace("{node}", name) for word in self._words]
        node = self._names.index(name) if self._links is not None else 0
        command = [*self._enter(node), sys.executable, "-m", "megatron_asynchzp.commands.torchrun"]
        command += ["--local-addr", self._address(node), *self._options, *words]
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

    def sent_nbytes(self, name: str) -> int:
        """What a node has sent over its link."""
        command = [*self._enter(self._names.index(name)), "cat", "/proc/self/net/dev"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (numbers,) = [line.split()[1:] for line in text.splitlines() if "eth0:" in line]
        return int(numbers[8])

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


def _python(code: str, *words: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, words)]


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
