# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a command that starts no ranks ends where it refuses what it was asked."""

import sys
from collections.abc import Callable

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.process.refusal import EXIT_USAGE


def exit_status(run: Callable[[list[str]], int], argv: list[str]) -> int:
    """Return `run`'s status, or EXIT_USAGE with its ConfigurationError as one line on stderr."""
    try:
        return run(argv)
    except ConfigurationError as error:
        print(f"megatron_asynchzp: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE
