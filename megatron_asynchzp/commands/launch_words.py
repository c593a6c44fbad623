# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what words and environment of a command show before torch and Megatron are imported."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_asynchzp.errors import ConfigurationError, MissingPackage, require
from megatron_asynchzp.mcore.flags.checks import check_is_rank
from megatron_asynchzp.mcore.flags.command_line import words_by_flag

DEFAULT_SCRIPT = "pretrain_gpt.py"


def split_at_script(argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Split at the first word that ends in .py: torchrun's options, SCRIPT, its arguments."""
    at = next((index for index, word in enumerate(argv) if word.endswith(".py")), None)
    if at is None:
        refuse_as_script(argv)
    return list(argv[:at]), argv[at], list(argv[at + 1 :])


def parse_before_dashes(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Parse the words up to `--`, and return them and the training command behind it."""
    own, command = list(argv), list[str]()
    if "--" in own:
        place = own.index("--")
        own, command = own[:place], own[place + 1 :]
    elif any(word.endswith(".py") for word in own):
        parser.error(
            "give the training command after --, as in: -- pretrain_gpt.py --num-layers 32"
        )
    return parser.parse_args(own), command


def check_script(script: Path) -> None:
    if not script.is_file():
        raise ConfigurationError(f"{script}: no such script")


def refuse_as_script(argv: Sequence[str]) -> NoReturn:
    """Raise ConfigurationError for words among which no training script is."""
    fault = "no training script is given"
    if words := [word for word in argv if not word.startswith("-") and not word.isdecimal()]:
        fault = f"{words[0]} is no Python script"
        if words[0] == "PRETRAIN":
            fault = "PRETRAIN stands for the path of a training script"
    raise ConfigurationError(
        f"{fault}; name one that ends in .py, such as pretrain_gpt.py of Megatron-LM, behind the "
        "options of torchrun: asynchzp launch --nproc-per-node 8 SCRIPT.py --use-asynchzp ... "
        "(--help lists the flags)"
    )


def check_rank(argv: Sequence[str]) -> None:
    """Raise ConfigurationError for a process that is half a rank, or gets torchrun's options."""
    if argv and argv[0].startswith("-"):
        raise ConfigurationError(
            f"RANK={os.environ['RANK']} in the environment says that this process is a rank, and "
            f"{argv[0]} is for torchrun, which starts ranks; unset RANK, or leave torchrun's "
            "options out"
        )
    check_is_rank()


def check_packages(arguments: Sequence[str]) -> None:
    """Raise MissingPackage for Muon without its arithmetic; print a line without TensorBoard."""
    # Megatron trains without a writer of scalars, and blames the version of torch.
    given = words_by_flag(arguments)
    for optimizer in {"muon", "dist_muon"}.intersection(given.get("--optimizer", ())):
        require("emerging_optimizers", f"--optimizer {optimizer}")
    try:
        if "--tensorboard-dir" in given and os.environ.get("RANK") == "0":
            require("tensorboard", "--tensorboard-dir")
    except MissingPackage as missing:
        print(f"megatron_asynchzp: {missing}; no scalars are written", flush=True)
