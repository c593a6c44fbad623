# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Each flag of Megatron has a verdict: it has a rule of --use-asynchzp, or no_concern.txt names it.
A new core with a flag that has neither fails here, on the first day."""

from argparse import ArgumentParser
from pathlib import Path

from megatron.training.arguments import add_megatron_arguments

from megatron_asynchzp.mcore.flags.rule_table import RULES
from megatron_asynchzp.mcore.flags.rules import OURS

_LIST = Path(__file__).with_name("no_concern.txt")


def listed() -> list[str]:
    lines = (line.partition("#")[0] for line in _LIST.read_text().splitlines())
    return [name for line in lines for name in line.split()]


def ruled() -> set[str]:
    return {rule.setting for rule in RULES[OURS]}


def unjudged(parser: ArgumentParser) -> set[str]:
    known = ruled() | set(listed()) | {"help"}
    return {action.dest for action in parser._actions} - known


def megatrons_parser() -> ArgumentParser:
    made = ArgumentParser(allow_abbrev=False)
    return getattr(add_megatron_arguments, "__wrapped__", add_megatron_arguments)(made) or made


def test_no_flag_of_this_megatron_is_without_a_verdict():
    """What is missing gets a rule, or a test that it works and a place in the list."""
    parser = megatrons_parser()
    assert unjudged(parser) == set()
    parser.add_argument("--shard-everything-twice")
    assert unjudged(parser) == {"shard_everything_twice"}


def test_the_list_names_each_flag_once_and_none_that_has_a_rule():
    assert not set(listed()) & ruled()
    assert len(set(listed())) == len(listed())
