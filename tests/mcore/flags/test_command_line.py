# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The check of a command line before torch is imported."""

import subprocess
import sys
from argparse import ArgumentParser

import pytest

from megatron_asynchzp import launch
from megatron_asynchzp.attention.pasa import MODES, VENDOR_NAMES
from megatron_asynchzp.command import COMMANDS
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.command_line import check_command_line, mistyped, own_flags
from megatron_asynchzp.mcore.flags.megatron_settings import MegatronSettings
from megatron_asynchzp.mcore.flags.pasa import MODE_CHOICES, VENDOR_CHOICES
from megatron_asynchzp.mcore.flags.refusals import REFUSALS
from megatron_asynchzp.mcore.patches.arguments import add_arguments
from scripts.report import megatron_tables
from tests.mcore.flags.conftest import action_of


def test_every_flag_explains_itself_in_the_launchers_usage(parser):
    ours = [action for action in parser._actions if own_flags() & {*action.option_strings}]
    assert len(ours) > 10 and all(action.help for action in ours)
    assert [one for one in ours if f"  {one.option_strings[0]}" not in launch.usage()] == []


def test_the_documentations_tables_are_those_of_the_code():
    page = megatron_tables.PAGE.read_text()
    assert megatron_tables.with_tables(page) == page


def test_choices_are_those_of_the_attention():
    assert MODE_CHOICES == MODES and ("auto", *VENDOR_NAMES) == VENDOR_CHOICES


def test_no_flag_of_megatron_is_taken_for_a_mistyped_flag_of_ours(parser):
    own = own_flags()
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert len(flags) > 500
    assert not {flag: meant for flag in flags - own if (meant := mistyped(flag, own))}


@pytest.mark.parametrize("flag", sorted(own_flags()))
def test_a_letter_left_out_of_a_flag_of_ours_names_the_flag(flag):
    own = own_flags()
    for at in range(6, len(flag)):
        wrong = flag[:at] + flag[at + 1 :]
        if wrong not in own:
            assert mistyped(wrong, own) == flag, wrong


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_what_one_flag_decides_is_refused_with_the_line_of_the_full_check(refusal, parser, parse):
    action_of(parser, refusal.flag)
    words = ["--use-asynchzp", *refusal.example.split()]
    if not refusal.is_decided_by_flag:
        check_command_line(words)
        return
    with pytest.raises(ConfigurationError) as refused:
        check_command_line(words)
    assert str(refused.value) == refusal.line(MegatronSettings(parse(refusal.example)))


@pytest.mark.parametrize(
    "flag, ranks, valid", [("param", 4, "1, 2, 4"), ("grad", 6, "1, 2, 3, 6"), ("optim", 1, "1")]
)
def test_a_size_that_divides_no_run_of_the_ranks_is_refused_with_all_that_may(flag, ranks, valid):
    for size in (0, 5, ranks + 1, -1):
        words = f"--use-asynchzp --asynchzp-{flag}-shard-size={size}".split()
        line = f"size {size} does not divide the {ranks} ranks of the run; valid values: {valid}, "
        with pytest.raises(ConfigurationError, match=line):
            check_command_line(words, ranks)
        check_command_line(words)  # the ranks are not known


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--num-layers 2 --tensor-model-parallel-size 3",
        "--use-asynchzp --asynchzp-param-shard-size=2 --asynchzp-optim-shard-size 4",
        "--use-asynchzp --save runs --save-interval 10 --load runs",
        "--use-asynchzp --use-checkpoint-args --tensor-model-parallel-size 3",
        "--use-asynchzp --cuda-graph-impl none --ckpt-format torch_dist",
        "--use-asynchzp --data-path s3://bucket/prefix",
        "--use-asynchzp --save-activations-interval 0",
        "--asynchzp-device cpu",
        "--use-pasa-attention --pasa-mode block",
        "--use-asynchzp --no-such-flag-of-megatron 1",
    ],
)
def test_what_can_be_meant_is_let_through(line):
    check_command_line(line.split(), world_size=4)


@pytest.mark.parametrize("use", ["--use-asynchzp", "--use-pasa-attention"])
def test_a_file_that_drops_all_flags_is_refused_while_megatron_builds_its_parser(monkeypatch, use):
    monkeypatch.setattr(sys, "argv", ["train.py", use, "--yaml-cfg", "run.yaml"])
    with pytest.raises(ConfigurationError, match=f"^--yaml-cfg run.yaml .* with {use}: "):
        add_arguments.make(lambda parser: parser)(ArgumentParser())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_its_name_and_options_without_torch(name):
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = [{name!r}, '--help']\n"
        "try: runpy.run_module('megatron_asynchzp', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'megatron'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"asynchzp {name} " in done.stdout


def test_checking_a_command_line_loads_neither_torch_nor_megatron():
    code = (
        "import sys, megatron_asynchzp.launch, megatron_asynchzp.command; "
        "print([m for m in ('torch', 'numpy', 'megatron') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
