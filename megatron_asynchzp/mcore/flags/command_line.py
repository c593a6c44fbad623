# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks our flags in the words of a command line, before torch is imported."""

import re
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from difflib import get_close_matches

from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.flags.arguments import add_asynchzp_arguments, config_of
from megatron_asynchzp.mcore.flags.megatron_settings import MegatronSettings
from megatron_asynchzp.mcore.flags.pasa import PASA, add_pasa_arguments
from megatron_asynchzp.mcore.flags.rule_table import RULES
from megatron_asynchzp.mcore.flags.rules import OURS, argument_of, refuse

# Flags that have an effect without the flag that their names begin with.
_ALONE = re.compile("--(use-.*|asynchzp-(device|device-gb|dry-run|capture-attention))")
# How similar an unknown flag must be to one of ours; no flag of Megatron comes near it.
_SIMILARITY = 0.9


def check_command_line(argv: Sequence[str], world_size: int | None = None) -> None:
    """Refuse a mistake in our flags among the words behind the script."""
    own, given = own_flags(), words_by_flag(argv)
    for flag in given:
        if meant := mistyped(flag, own):
            raise ConfigurationError(f"{flag}: no such flag; the nearest is {meant}")
    try:
        args = _own_parser().parse_known_args(argv)[0]
    except ArgumentError as error:
        name = (error.argument_name or "").split("/")[0]
        raise ConfigurationError(f"{name}: {error.message}") from error
    for flag in filter(own.__contains__, given):
        use = PASA if "pasa" in flag else OURS
        if use not in given and not _ALONE.fullmatch(flag):
            raise ConfigurationError(f"{flag} has no effect without {use}; add {use}, or drop it")
    check_single_flags(argv)
    if OURS in given:
        raise_first(config_of(args).faults_of_run(world_size))


def check_single_flags(argv: Sequence[str]) -> None:
    """Raise Refused for settings that a rule refuses by one flag alone."""
    given = words_by_flag(argv)
    values = {argument_of(flag): _value(words) for flag, words in given.items()}
    for use, rules in RULES.items():
        single = (rule for rule in rules if rule.is_decided_by_flag and rule.flag in given)
        refuse(single if use in given else (), MegatronSettings(Namespace(**values)))


def own_flags() -> set[str]:
    return {*_own_parser()._option_string_actions}


def mistyped(flag: str, own: set[str]) -> str | None:
    """Return the flag of ours that the unknown `flag` was probably meant to be."""
    cutoff = 0.0 if re.search("asynchzp|pasa-", flag) else _SIMILARITY
    near = get_close_matches(flag, sorted(own), 1, cutoff)
    return near[0] if near and flag not in own else None


def _own_parser() -> ArgumentParser:
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    return add_pasa_arguments(add_asynchzp_arguments(parser))


def words_by_flag(argv: Sequence[str]) -> dict[str, list[str]]:
    given, words = dict[str, list[str]](), list[str]()
    for word in argv:
        if word.startswith("--"):
            flag, is_assigned, value = word.partition("=")
            words = given[flag] = [value] * bool(is_assigned)
        else:
            words.append(word)
    return given


def _value(words: list[str]) -> object:
    value = next(iter(words), True)
    return words if len(words) > 1 else 0 if value == "0" else value
