# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One process that runs many command lines, forked from the one that has imported Megatron: that
takes longer than most commands, and nothing is replaced there that a test has replaced here."""

import contextlib
import io
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from scripts.testbed import ranks

_ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str


RunCommand = Callable[..., Ended]
"""Called with the words of a command line, and variables of the environment by name."""


@contextmanager
def serving(main: Callable[[list[str]], int | None]) -> Iterator[RunCommand]:
    """A function that calls `main` in a process that lives as long as the context."""
    ours, theirs = multiprocessing.Pipe()
    process = ranks.start_process(_serve, main, theirs)
    theirs.close()

    def run(*words: str, **env: str) -> Ended:
        ours.send((words, env))
        return Ended(*ours.recv())

    try:
        yield run
    finally:
        ours.close()
        process.join(timeout=10)
        process.kill()


def _serve(main: Callable[[list[str]], int | None], requests: Connection) -> None:
    os.chdir(_ROOT)
    warnings.simplefilter("ignore")
    for number in (1, 2):  # what libraries print beside Python
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    with contextlib.suppress(EOFError):
        while True:
            words, env = requests.recv()
            os.environ.update({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | env)
            requests.send(_run(main, words))


def _run(main: Callable[[list[str]], int | None], words: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(list(words)) or 0
        except SystemExit as ended:
            status = ended.code or 0
    return status, out.getvalue(), err.getvalue()
