# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks were started with the same flags, versions and environment."""

import re
import sys
from argparse import ArgumentParser
from typing import Any

import torch

from megatron_asynchzp.engine.comm.agreement import (
    PATH,
    check_same_settings,
    process_settings,
    text_of,
)
from megatron_asynchzp.mcore.patches.patch import found_version

# Settings that may differ between ranks or nodes: the name of a rank, and its reports.
_OF_ONE_RANK = re.compile(
    r"rank|tensorboard_dir|config_logger_dir|data_cache_path"
    r"|(wandb|one_logger|profile|pytorch_profiler|flight_recorder|record|memory_snapshot)(_.*)?"
    r"|(.*_)?(host|hostname|addr|address|ip|port|name|tag|url|local_rank|node_rank|logging_level)"
)
_FILES = re.compile(r"(.*_)?(load|save|dir|path|file|folder|prefix|tokenizer_model)")


def refuse_other_flags(megatron: Any) -> None:
    """Raise ConfigurationError, on every rank, if flags, versions or environment differ.

    The number of a rank, its folders and its reports may differ. Collective over the world.
    """
    flags = {
        name: _without_files(value) if _FILES.fullmatch(name) else text_of(value)
        for name, value in vars(megatron).items()
        if not _OF_ONE_RANK.fullmatch(name)
    }
    check_ranks_agree(flags)


def check_ranks_agree(settings: dict[str, str]) -> None:
    """Raise ConfigurationError, on every rank, where `settings`, versions or environment differ.

    Collective over the world.
    """
    process = process_settings() | {"the version of megatron-core": found_version()}
    check_same_settings(
        settings | process,
        None,
        torch.accelerator.current_accelerator() or torch.device("cpu"),
        "start every rank with the same flags, versions and environment",
        _spelt,
    )


def _spelt(name: str) -> str:
    """Return the flag of the argument `name`; the name itself for a framework without flags."""
    if "megatron.training.arguments" not in sys.modules:
        return name
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser(add_help=False))
    actions = parser._actions
    flags = (action.option_strings for action in actions if action.dest == name)
    return next((words[0] for words in flags if words), name)


def _without_files(value: object) -> str:
    """Return the text of `value` in which PATH stands for each path; weights of datasets stay."""
    if isinstance(value, (list, tuple)):
        return text_of([word if _is_number(word) else PATH for word in value])
    return PATH if isinstance(value, str) else text_of(value)


def _is_number(word: object) -> bool:
    return re.fullmatch(r"[\d.eE+-]+", str(word)) is not None
