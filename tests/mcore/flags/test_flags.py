# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The flags of this plugin against Megatron's real parser. Starts no process and no training."""

from argparse import ArgumentParser, Namespace
from itertools import product
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_asynchzp import launch
from megatron_asynchzp.mcore.flags import asynchzp as arguments
from megatron_asynchzp.mcore.flags.asynchzp import NORMALISATIONS, resolve_shard_sizes
from megatron_asynchzp.mcore.flags.refusals import (
    REFUSALS,
    ConfigurationError,
    UnsupportedConfiguration,
    refuse_unsupported,
)
from megatron_asynchzp.mcore.patches.table import PATCHES
from megatron_asynchzp.sharding.topology import ShardSizes

_PLAIN = "--use-asynchzp --mock-data --micro-batch-size 1 --global-batch-size 8 --bf16"


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    made = ArgumentParser(allow_abbrev=False)
    # The name as it is in Megatron, whether or not another test patched it.
    getattr(add_megatron_arguments, "__wrapped__", add_megatron_arguments)(made)
    return arguments.add_asynchzp_arguments(made)


@pytest.fixture
def parse(parser):
    def from_line(line: str = "", world_size: int = 8) -> Namespace:
        args = parser.parse_args(f"{_PLAIN} {line}".split())
        args.rank, args.world_size = 0, world_size
        return args

    return from_line


def test_every_flag_explains_itself(parse):
    alone = arguments.add_asynchzp_arguments(ArgumentParser())
    told = alone.format_help()
    assert "--asynchzp-optim-shard-size RANKS" in told and "--use-asynchzp" in told
    assert all(action.help for action in alone._actions)


def test_the_launchers_usage_lists_the_flags():
    alone = arguments.add_asynchzp_arguments(ArgumentParser(add_help=False))
    for action in alone._actions:
        assert f"  {action.option_strings[0]} " in launch.USAGE


def test_a_plain_run_is_not_refused(parse):
    refuse_unsupported(parse())


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_each_unsupported_flag_is_refused_in_one_line_with_reason_and_remedy(parse, refusal):
    with pytest.raises(UnsupportedConfiguration) as refused:
        refuse_unsupported(parse(refusal.example))
    line = str(refused.value)
    assert line.startswith(f"{refusal.flag} is not supported with --use-asynchzp: ")
    assert refusal.reason in line and refusal.remedy in line and "\n" not in line


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_each_refused_flag_is_one_that_megatron_has(parser, refusal):
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert refusal.flag in flags


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_a_flag_is_refused_by_its_own_row_and_no_other(parse, refusal):
    args = parse(refusal.example)
    assert [row.flag for row in REFUSALS if row.is_asked(args)] == [refusal.flag]


@pytest.mark.parametrize("rule", NORMALISATIONS, ids=lambda rule: rule.name)
def test_each_argument_that_is_switched_off_is_one_that_megatron_has(parser, rule):
    action = next(action for action in parser._actions if rule.flag in action.option_strings)
    assert action.dest == rule.name


@pytest.mark.parametrize(
    "line, name",
    [
        ("--use-distributed-optimizer", "use_distributed_optimizer"),
        ("--overlap-grad-reduce", "overlap_grad_reduce"),
        ("--overlap-param-gather", "overlap_param_gather"),
        ("--ddp-average-in-collective", "ddp_average_in_collective"),
        ("--create-all-gather-group", "create_all_gather_group"),
        ("--ddp-bucket-size 100", "ddp_bucket_size"),
    ],
)
def test_what_asynchzp_replaces_is_switched_off_with_a_line_in_the_log(parse, line, name):
    args = parse(line)
    lines = arguments.normalize_args(args)
    assert not getattr(args, name)
    assert sum(told.startswith(f"{name} = ") for told in lines) == 1


def test_a_second_normalisation_changes_nothing_and_says_nothing(parse):
    args = parse("--use-distributed-optimizer --overlap-grad-reduce")
    assert arguments.normalize_args(args)
    assert arguments.normalize_args(args) == []


def test_gradients_of_fp16_runs_are_reduced_in_fp32(parse):
    args = parse("--fp16")
    args.bf16 = False
    lines = arguments.normalize_args(args)
    assert any(line.startswith("accumulate_allreduce_grads_in_fp32 = True") for line in lines)
    assert args.accumulate_allreduce_grads_in_fp32


def test_a_run_that_saves_has_megatrons_handler_of_sigterm(parse):
    args = parse("--save dir --save-interval 10")
    told = arguments.normalize_args(args)
    assert args.exit_signal_handler
    assert sum(line.startswith("exit_signal_handler = True: SIGTERM ") for line in told) == 1
    args = parse()
    assert "exit_signal_handler" not in " ".join(arguments.normalize_args(args))
    assert not args.exit_signal_handler


def test_arguments_are_left_alone_when_the_run_is_refused(parse):
    args = parse("--use-distributed-optimizer --qk-clip")
    before = dict(vars(args))
    with pytest.raises(UnsupportedConfiguration):
        arguments.prepare_args(args)
    assert vars(args) == before


# --- shard sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, group_size, ranks_per_node, expected",
    [
        ("", 8, 8, (8, 8, 8)),
        ("", 16, 8, (8, 8, 16)),
        ("", 8, 1, (1, 1, 8)),
        ("--asynchzp-param-shard-size 2", 8, 4, (2, 4, 8)),
        ("--asynchzp-grad-shard-size 2", 16, 8, (8, 2, 16)),
        ("--asynchzp-optim-shard-size 2", 8, 8, (2, 2, 2)),
        ("--asynchzp-grad-shard-size 6", 12, 4, (2, 6, 12)),
        ("--asynchzp-param-shard-size 1 --asynchzp-optim-shard-size 1", 8, 4, (1, 1, 1)),
        (
            "--asynchzp-param-shard-size 2 --asynchzp-grad-shard-size 4 "
            "--asynchzp-optim-shard-size 8",
            8,
            2,
            (2, 4, 8),
        ),
    ],
)
def test_defaults_follow_the_node_and_the_flags_that_were_given(
    parse, line, group_size, ranks_per_node, expected
):
    assert resolve_shard_sizes(parse(line), group_size, ranks_per_node) == ShardSizes(*expected)


@pytest.mark.parametrize(
    "line, group_size, flag, valid",
    [
        ("--asynchzp-param-shard-size 3", 8, "--asynchzp-param-shard-size 3", "1, 2, 4, 8"),
        ("--asynchzp-grad-shard-size 0", 4, "--asynchzp-grad-shard-size 0", "1, 2, 4"),
        ("--asynchzp-optim-shard-size 16", 8, "--asynchzp-optim-shard-size 16", "1, 2, 4, 8"),
        (
            "--asynchzp-param-shard-size 4 --asynchzp-optim-shard-size 2",
            8,
            "--asynchzp-optim-shard-size 2",
            "4, 8",
        ),
        (
            "--asynchzp-param-shard-size 2 --asynchzp-grad-shard-size 3",
            12,
            "--asynchzp-grad-shard-size 3",
            "1, 2, 4, 6, 12",
        ),
    ],
)
def test_sizes_that_do_not_nest_name_the_flag_and_the_valid_values(
    parse, line, group_size, flag, valid
):
    with pytest.raises(ConfigurationError) as refused:
        resolve_shard_sizes(parse(line), group_size, 4)
    told = str(refused.value)
    assert told.startswith(flag) and told.endswith(f"valid values: {valid}")
    assert f"the {group_size} ranks" in told and "\n" not in told


def test_the_defaults_fit_every_group(parse):
    args = parse()
    for group_size, ranks_per_node in product(range(1, 25), range(1, 9)):
        sizes = resolve_shard_sizes(args, group_size, ranks_per_node)
        sizes.check(group_size)
        assert sizes.optim == group_size


@pytest.mark.parametrize(
    "line, world_size, local_world_size, expected",
    [
        ("", 16, 8, 8),
        ("--tensor-model-parallel-size 2", 16, 8, 4),
        ("--tensor-model-parallel-size 8", 16, 8, 1),
        ("--pipeline-model-parallel-size 2", 16, 8, 8),
        ("--pipeline-model-parallel-size 4", 16, 8, 4),
        ("--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", 16, 8, 4),
        ("--context-parallel-size 2", 16, 8, 8),
        ("", 12, 8, 4),
    ],
)
def test_ranks_per_node_counts_the_sharding_group_in_megatrons_rank_order(
    parse, monkeypatch, line, world_size, local_world_size, expected
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    assert arguments.sharding_ranks_per_node(parse(line, world_size)) == expected


def test_the_sizes_of_a_valid_run_are_written_into_the_arguments(parse, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    args = parse("--asynchzp-grad-shard-size 2")
    arguments.prepare_args(args)
    assert args.asynchzp_param_shard_size == 4
    assert args.asynchzp_grad_shard_size == 2
    assert args.asynchzp_optim_shard_size == 8


def test_what_megatron_switches_on_again_is_noticed(parse):
    args = parse()
    arguments.prepare_args(args)
    args.use_distributed_optimizer = True
    with pytest.raises(ConfigurationError, match="use_distributed_optimizer"):
        arguments.confirm_args(args)


# --- other bad input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, world_size, words",
    [
        ("--tensor-model-parallel-size 4", 2, "2 ranks .* start 4 ranks"),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 6, "= 4; start 4"),
        ("--global-batch-size 9", 8, "--global-batch-size 9 .* use a multiple of 8"),
    ],
)
def test_a_world_or_batch_that_does_not_divide_is_refused(parse, line, world_size, words):
    with pytest.raises(ConfigurationError, match=words):
        arguments.prepare_args(parse(line, world_size))


def _touch_dataset(folder, name: str) -> str:
    for ending in (".idx", ".bin"):
        (folder / (name + ending)).write_bytes(b"")
    return str(folder / name)


@pytest.mark.parametrize("flag", ["--data-path", "--train-data-path", "--valid-data-path"])
def test_a_dataset_that_is_not_there_is_named_before_training(parse, tmp_path, flag):
    there, missing = _touch_dataset(tmp_path, "there"), str(tmp_path / "missing")
    arguments.refuse_missing_data(parse(f"{flag} {there}"))
    arguments.refuse_missing_data(parse(f"{flag} 0.5 {there} 0.5 {there}"))
    with pytest.raises(ConfigurationError, match=f"{flag} {missing}: no dataset there") as refused:
        arguments.refuse_missing_data(parse(f"{flag} 0.5 {there} 0.5 {missing}"))
    assert "\n" not in str(refused.value)


def test_half_a_dataset_is_named_by_the_missing_half(parse, tmp_path):
    (tmp_path / "half.idx").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"\(.*half.bin missing\)"):
        arguments.refuse_missing_data(parse(f"--data-path {tmp_path}/half"))


def test_datasets_listed_in_a_file_are_checked_too(parse, tmp_path):
    listing = tmp_path / "data.txt"
    with pytest.raises(ConfigurationError, match="no such file"):
        arguments.refuse_missing_data(parse(f"--data-args-path {listing}"))
    listing.write_text(f"1.0 {tmp_path}/missing")
    with pytest.raises(ConfigurationError, match="--data-args-path .*missing: no dataset there"):
        arguments.refuse_missing_data(parse(f"--data-args-path {listing}"))


def test_object_storage_is_left_to_megatron(parse):
    arguments.refuse_missing_data(parse("--data-path s3://bucket/prefix"))


@pytest.mark.parametrize("flag", ["--yaml-cfg run.yaml", "--yaml-cfg=run.yaml"])
def test_a_yaml_configuration_cannot_drop_use_asynchzp_silently(flag):
    with pytest.raises(ConfigurationError, match="--yaml-cfg"):
        arguments.refuse_yaml(["--use-asynchzp", *flag.split()], "--use-asynchzp")
    arguments.refuse_yaml(flag.split(), "--use-asynchzp")


def test_saving_beside_training_needs_its_writer(parse, monkeypatch):
    flags = "--async-save --use-persistent-ckpt-worker"
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="^--async-save: .* add --async-strategy mcore$"):
        arguments.refuse_missing_writer(parse(flags))
    arguments.refuse_missing_writer(parse(f"{flags} --async-strategy mcore"))
    monkeypatch.setattr(arguments, "find_spec", lambda name: object())
    arguments.refuse_missing_writer(parse(flags))


def test_the_documentation_lists_every_refusal_normalisation_and_patch_point():
    told = (Path(__file__).parents[3] / "docs" / "megatron.md").read_text()
    words = [refusal.flag for refusal in REFUSALS] + [refusal.reason for refusal in REFUSALS]
    words += [f"| `{rule.name}` | {rule.value} | {rule.reason} |" for rule in NORMALISATIONS]
    words += [f"`{patch.target}`" for patch in PATCHES] + [patch.drop_when for patch in PATCHES]
    assert [word for word in words if word not in told] == []
