# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks with emulated devices, started from a process that has none.

    with DeviceWorlds() as worlds:
        worlds.run(check, 2, delays=Delays("uniform", seed=7))  # check(), on NCCL, cuda:0 and 1

What is preloaded has to be there before torch is. So a process with it serves all runs, and forks
their ranks as `scripts.testbed.ranks` does.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.platforms import environment
from scripts.testbed.rank import end_with_starter

_SERVER = "scripts.testbed.device.server"
# What each rank would import for a second or more; torch its compiler with the first operation.
_LATE = ("torch._dynamo", "megatron_asynchzp.library.sharded_model", "pytest")
_OWN_LINES = "emulated device: "


class DeviceFailure(RuntimeError):
    """A run failed: why, and under which delays."""


class DeviceWorlds:
    """preload: modules that the server of the ranks imports once; platform: of platforms.py."""

    def __init__(self, preload: Sequence[str] = (), platform: str = "cuda"):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        self._connection, theirs = Pipe()
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        env = os.environ | path | environment(platform=platform)
        command = [sys.executable, "-m", _SERVER, str(theirs.fileno()), *preload]
        self._server = subprocess.Popen(
            command, env=env, pass_fds=[theirs.fileno()], stdout=self._log, stderr=self._log
        )
        theirs.close()

    def run(
        self,
        fn: Callable,
        world_size: int,
        *args: Any,
        delays: Delays = Delays(),
        timeout_s: float = 180.0,
        env: dict[str, str] | None = None,
        watches: bool = True,
    ) -> list[Any]:
        """Run `fn(*args)` on every rank, and return the results.

        Each rank has a device, and NCCL or HCCL as the default group. fn, args and results must
        pickle. `watches`: fail for accesses that nothing orders. Raises DeviceFailure.
        """
        start = self._log.seek(0, os.SEEK_END)
        self._connection.send((fn, world_size, args, delays, timeout_s, env, watches))
        try:
            has_returned, value = self._connection.recv()
        except EOFError:
            has_returned, value = False, "the server of the ranks has ended"
        if has_returned:
            return value  # pyright: ignore[reportReturnType]
        self._log.seek(start)
        lines = self._log.read().decode(errors="replace").splitlines()
        own = [line for line in lines if line.startswith(_OWN_LINES)]
        raise DeviceFailure("\n".join([f"{delays}:", *(own or lines[-60:]), value]))

    def close(self) -> None:
        self._connection.close()
        try:
            self._server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def __enter__(self) -> "DeviceWorlds":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- in the server


def serve(requests: Connection, preload: Sequence[str]) -> None:
    """Serve requests until the other end is closed."""
    from scripts.testbed import ranks

    end_with_starter()
    ranks.preload(["scripts.testbed.device.inside", *_LATE, *preload])
    while True:
        try:
            fn, world_size, args, delays, timeout_s, env, watches = requests.recv()
        except EOFError:
            return
        join = partial(_join, delays, watches)
        try:
            result = ranks.run_ranks(fn, world_size, *args, timeout_s=timeout_s, env=env, join=join)
            requests.send((True, result))
        except ranks.RankFailure as error:
            requests.send((False, str(error)))


def _join(delays: Delays, watches: bool, place: Any) -> tuple[()]:
    from datetime import timedelta

    import torch.distributed as dist

    from scripts.testbed.device import inside

    inside.start(place.rank, place.world_size, watches)
    inside.set_delays(delays, place.rank, place.world_size)
    dist.init_process_group(
        inside.BACKEND,
        store=dist.TCPStore("127.0.0.1", place.port, is_master=False),  # pyright: ignore[reportPrivateImportUsage]
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=90),
    )
    return ()
