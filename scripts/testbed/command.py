# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the processes of a command that runs as several ranks."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import IO, NamedTuple

_LAST_LINES = 20  # of the output of a rank that failed
_GRACE_S = 5.0  # for what a rank does at Ctrl-C


class RankCommand(NamedTuple):
    """The command of a rank, with variables in addition to those of this process."""

    argv: Sequence[str]
    env: Mapping[str, str]


def run_as_ranks(name: str, commands: Sequence[RankCommand], timeout_s: float | None = None) -> int:
    """Run all commands at the same time; the status of the first one that fails, else 0.

    The output of rank 0 is shown. Of another rank it is shown, its last lines, where that rank
    fails. name: of the program, before each message. The status is 124 at the time limit, 130
    after Ctrl-C and 143 after SIGTERM. The ranks and the processes that they have started are
    killed at the end, whatever happens.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    processes: list[subprocess.Popen] = []
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        stack.callback(_kill, processes)
        logs = [None, *(stack.enter_context(TemporaryFile()) for _ in commands[1:])]
        try:
            for command, log in zip(commands, logs):
                processes.append(_start(command, log))
            return _await(name, processes, logs, timeout_s)
        except KeyboardInterrupt:
            _interrupt(processes)
            print(f"{name}: interrupted", file=sys.stderr)
            return 130


def _start(command: RankCommand, log: IO[bytes] | None) -> subprocess.Popen:
    """Start a rank in a session of its own.

    Ctrl-C reaches it through this process, and its own processes can be killed with it.
    """
    return subprocess.Popen(
        command.argv, env=os.environ | command.env, stdout=log, stderr=log, start_new_session=True
    )


def _await(
    name: str, processes: list[subprocess.Popen], logs: list, timeout_s: float | None
) -> int:
    deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
    running = set(range(len(processes)))
    while running:
        for rank in sorted(running):
            if (status := processes[rank].poll()) is None:
                continue
            running.discard(rank)
            if status:
                if logs[rank] is not None:
                    _show_last_lines(logs[rank])
                status = status if status > 0 else 128 - status
                print(f"{name}: rank {rank} ended with status {status}", file=sys.stderr)
                return status
        if time.monotonic() > deadline:
            print(f"{name}: not finished after {timeout_s:.0f} s", file=sys.stderr)
            return 124
        time.sleep(0.02)
    return 0


def _show_last_lines(log: IO[bytes]) -> None:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    print(*lines[-_LAST_LINES:], sep="\n", file=sys.stderr)


def _interrupt(processes: list[subprocess.Popen]) -> None:
    """Ctrl-C for every rank, and time to end."""
    _signal_groups(processes, signal.SIGINT)
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # killed next


def _kill(processes: list[subprocess.Popen]) -> None:
    _signal_groups(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal_groups(processes: list[subprocess.Popen], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass  # the rank and all that it started have ended


# ---- options that every program has that runs a command


def split_command(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """The options before --, and the command after it."""
    middle = argv.index("--") if "--" in argv else len(argv)
    args, command = parser.parse_args(argv[:middle]), list(argv[middle + 1 :])
    if not command:
        parser.error("no command: put it after --")
    return args, command


def count(text: str) -> int:
    """For argparse: a number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)
