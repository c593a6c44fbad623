# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The console command `asynchzp COMMAND ...`, which imports each command's module at its use."""

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from megatron_asynchzp import __version__
from megatron_asynchzp.errors import MissingPackage

_EXIT_USAGE = 2


class Command(NamedTuple):
    """A command: `function` of `module` gets the words after it and returns an exit status."""

    module: str
    function: str
    purpose: str


COMMANDS = {
    "launch": Command("launch", "start", "train with torchrun and an unmodified Megatron script"),
    "dry-run": Command("launch", "dry_run", "print the memory of each rank, start nothing"),
    "plan": Command("commands.plan", "main", "find the fastest shard sizes on a cluster"),
    "migrate": Command("commands.migrate", "main", "list what changes for your training command"),
    "calibrate": Command("commands.calibrate", "main", "measure a cluster, under torchrun"),
    "hf": Command("hf.__main__", "main", "convert checkpoints to Hugging Face and back"),
    "inspect": Command("attention.inspect", "main", "tell whether a model needs PASA attention"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(("usage: asynchzp COMMAND ... | --version", "", *lines, "")) + (
        "\nasynchzp COMMAND --help lists the options of a command.\n"
    )


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if words == ["--version"]:
        print(f"megatron_asynchzp {__version__}")
        return 0
    if not words:
        print(usage(), end="", file=sys.stderr)
        return _EXIT_USAGE
    name, *rest = words
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"; the nearest is {near[0]}" if near else f" ({', '.join(COMMANDS)})"
        print(f"asynchzp: {name}: no such command{hint}", file=sys.stderr)
        return _EXIT_USAGE
    command = COMMANDS[name]
    try:
        function = getattr(import_module(f"megatron_asynchzp.{command.module}"), command.function)
        return function(rest) or 0
    except ModuleNotFoundError as error:
        if (missing := MissingPackage.of(error, f"asynchzp {name}")) is None:
            raise
        print(missing, file=sys.stderr)
        return _EXIT_USAGE
