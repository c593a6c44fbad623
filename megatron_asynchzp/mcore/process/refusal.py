# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ends a rank with a refused command line: one line, from one rank of a node. Loads no torch."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_asynchzp.engine.failure.descriptors import check_descriptors
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.command_line import check_command_line

# As argparse exits for a wrong command line.
EXIT_USAGE = 2

# How long the other ranks of a node wait for its first one to print. torchrun ends them as soon as
# that one has failed; a rank that fails alone prints after this time.
_FIRST_RANK_PRINTS_S = 15.0


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    """End the process with EXIT_USAGE and one line for a ConfigurationError within."""
    try:
        yield
    except ConfigurationError as error:
        report(error)
        sys.exit(EXIT_USAGE)


@refused_in_one_line()
def check_or_exit(argv: Sequence[str], world_size: int | None) -> None:
    """Refuse a mistake in our flags, or too few open files (the launcher asks for any node)."""
    check_descriptors(int(os.environ.get("RANK", "1")), world_size or 0)
    check_command_line(argv, world_size)


def world_size() -> int | None:
    """Return the number of ranks, which torchrun tells each; None for a process without it."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if ranks.isdecimal() else None


def report(error: BaseException) -> None:
    """Print an error of ours as one line, once per node; torchrun's final table repeats it."""
    obey_sigterm()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_RANK_PRINTS_S)
    line = " ".join(str(error).split())
    _leave_for_torchrun(line)
    sys.stderr.write(f"megatron_asynchzp: {line}\n")  # one write: ranks share a terminal
    sys.stderr.flush()


def obey_sigterm() -> None:
    """Let SIGTERM end this process, whose main thread is about to end anyway."""
    # A run that saves has Megatron's handler, which only notes the signal: torchrun, which sends it
    # to all ranks when one has failed, would wait for them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave_for_torchrun(line: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    error = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        Path(path).write_text(json.dumps({"message": error}))
    except OSError:
        pass  # the line is printed all the same
