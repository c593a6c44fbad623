# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Our flags explain themselves, in --help and in the documentation."""

from argparse import ArgumentParser

from megatron_asynchzp import launch
from megatron_asynchzp.mcore.flags.asynchzp import add_asynchzp_arguments
from megatron_asynchzp.mcore.flags.pasa import add_pasa_arguments
from scripts.report import megatron_tables


def test_every_flag_explains_itself_in_the_launchers_usage():
    ours = add_pasa_arguments(add_asynchzp_arguments(ArgumentParser(add_help=False)))._actions
    usage = launch.usage()
    assert len(ours) > 10 and all(action.help for action in ours)
    assert [a for a in ours if f"  {a.option_strings[0]}" not in usage] == []


def test_the_documentations_tables_are_those_of_the_code():
    page = megatron_tables.PAGE.read_text()
    assert megatron_tables.with_tables(page) == page
