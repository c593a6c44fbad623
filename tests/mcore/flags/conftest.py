# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's real parser with our flags, and command lines parsed by it."""

from argparse import Action, ArgumentParser, Namespace

import pytest
from megatron.core import package_info
from megatron.training.arguments import add_megatron_arguments

from megatron_asynchzp.mcore.flags.arguments import add_asynchzp_arguments
from megatron_asynchzp.mcore.flags.pasa import add_pasa_arguments

_PLAIN = "--use-asynchzp --mock-data --micro-batch-size 1 --global-batch-size 8 --bf16"


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    made = ArgumentParser(allow_abbrev=False)
    # The name as it is in Megatron, whether or not another test patched it.
    getattr(add_megatron_arguments, "__wrapped__", add_megatron_arguments)(made)
    return add_pasa_arguments(add_asynchzp_arguments(made))


def action_of(parser: ArgumentParser, flag: str) -> Action:
    """The argument of the first word of `flag`, which a later core may have alone."""
    name = flag.split()[0]
    actions = [action for action in parser._actions if name in action.option_strings]
    if not actions:
        pytest.skip(f"megatron-core {package_info.__version__} has no {name}")
    return actions[0]


@pytest.fixture
def parse(parser):
    def from_line(line: str = "", world_size: int = 8) -> Namespace:
        args = parser.parse_args(f"{_PLAIN} {line}".split())
        args.rank, args.world_size = 0, world_size
        return args

    return from_line
