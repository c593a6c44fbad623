# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Errors for bad input and missing packages, one-line parser errors, and names of ranks."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

_MOST_RUNS = 8

# What imports a package at its use alone, and the extra of ours that brings it.
EXTRAS = {
    "megatron": "megatron",
    "transformers": "hf",
    "safetensors": "hf",
    "pyarrow": "data",
    "matplotlib": "plots",
    "tensorboard": "quickstart",
    "triton": "triton",
    "torch_npu": "npu",
    "emerging_optimizers": "muon",
    "nvidia_resiliency_ext": "resiliency",
}


class ConfigurationError(ValueError):
    """A run that cannot start as asked. The message is one line, for the user."""


def raise_first(faults: Iterable[str]) -> None:
    """Raise ConfigurationError with the first of `faults`, if there is one."""
    for fault in faults:
        raise ConfigurationError(fault)


class MissingPackage(ConfigurationError):
    """A package that `user`, a flag or a command, needs and that is not installed."""

    def __init__(self, package: str, user: str):
        extra = EXTRAS.get(package)
        wanted = f'"megatron_asynchzp[{extra}]"' if extra else package
        super().__init__(
            f"{user}: needs the package {package}, which is not installed; pip install {wanted}"
        )

    @classmethod
    def of(cls, error: ImportError, user: str) -> "MissingPackage | None":
        """Translate an ImportError; None for a fault of ours or a package of another version."""
        package = (error.name or "").partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and not _is_there(package)
        return cls(package, user) if package and is_missing else None


class OneLineParser(ArgumentParser):
    """A parser of a command's own flags that ends with one line, which names the nearest flag."""

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else list(args)
        for word in words if self._subparsers is None else ():
            flag, known = word.partition("=")[0], self._option_string_actions
            if flag.startswith("--") and not any(name.startswith(flag) for name in known):
                near = [f"; the nearest is {name}" for name in get_close_matches(flag, known, 1)]
                self.error("".join((f"{flag}: no such flag", *near)))
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists all)\n")


def require(package: str, user: str) -> None:
    """Raise MissingPackage unless `package`, which `user` is about to import, is installed."""
    if not _is_there(package):
        raise MissingPackage(package, user)


def _is_there(package: str) -> bool:
    return not package or find_spec(package) is not None


def no_file_at(path: Path) -> str:
    """Say why `path` cannot become a file, and the remedy; "" if it can."""
    if path.is_dir():
        return "that is a folder; name a file in it"
    if not path.parent.exists():
        return "no such folder; name a file in a folder that exists"
    if not path.parent.is_dir():
        return f"{path.parent} is a file, not a folder; name a file in a folder"
    may_write = os.access(path if path.exists() else path.parent, os.W_OK)
    return "" if may_write else "it cannot be written to; name another file"


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive numbers in the sorted `ranks`."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


def name_ranks(ranks: Sequence[int]) -> str:
    """Name sorted ranks briefly: "rank 3", "ranks 1, 4 to 7", "ranks 0, 8, ..., 504"."""
    if not ranks:
        return "no rank"
    plural = "s" if len(ranks) > 1 else ""
    steps = {after - before for before, after in zip(ranks, ranks[1:])}
    if len(ranks) > 3 and len(steps) == 1 and steps != {1}:
        return f"ranks {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    runs = runs_of(ranks)
    named, rest = runs[:_MOST_RUNS], sum(b - a + 1 for a, b in runs[_MOST_RUNS:])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in named]
    return f"rank{plural} {', '.join(parts)}{f' and {rest} more' if rest else ''}"
