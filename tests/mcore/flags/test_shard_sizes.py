# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The three shard sizes: defaults for every group, and the line for sizes that do not nest."""

import re
from itertools import product

import pytest

from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.arguments import config_of
from megatron_asynchzp.mcore.flags.checks import prepare_args
from megatron_asynchzp.mcore.flags.shard_sizes import (
    STATES,
    resolve_shard_sizes,
    sharding_ranks_per_node,
)


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
        ("--asynchzp-param-shard-size node --asynchzp-grad-shard-size 6", 12, 4, (2, 6, 12)),
        ("--asynchzp-param-shard-size world", 12, 4, (12, 4, 12)),
        ("--asynchzp-grad-shard-size world", 12, 4, (4, 12, 12)),
        ("--asynchzp-optim-shard-size node", 12, 4, (4, 4, 4)),
        ("--asynchzp-optim-shard-size node", 12, 8, (4, 4, 4)),
        ("--asynchzp-optim-shard-size world", 12, 4, (4, 4, 12)),
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
    args = parse(line)
    sizes = resolve_shard_sizes(config_of(args), args, group_size, ranks_per_node)
    assert sizes == ShardSizes(*expected)


def test_long_axes_of_a_large_world_are_cut_and_the_start_says_so_in_one_line(parse, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for size in (512, 16384):
        args = parse("--global-batch-size 16384", world_size=size)
        lines = [one for one in prepare_args(args) if "axes of" in one]
        sizes = resolve_shard_sizes(config_of(args), args, size, 8)
        assert sizes == ShardSizes(8, 8, size, (512,) if size > 512 else ())
        assert len(lines) == (size > 512)
    assert "8 x 64 x 32 ranks" in lines[0] and "101 hops in place of 2054" in lines[0]


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--use-megatron-fsdp", (8, 8, 8)),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", (1, 1, 1)),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", (1, 1, 8)),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", (1, 8, 8)),
        ("--use-megatron-fsdp --num-distributed-optimizer-instances 2", (4, 4, 4)),
        (
            "--use-megatron-fsdp --num-distributed-optimizer-instances 2 "
            "--outer-dp-sharding-strategy optim",
            (4, 4, 8),
        ),
        ("--use-torch-fsdp2", (8, 8, 8)),
        ("--use-megatron-fsdp --asynchzp-grad-shard-size 2", (8, 2, 8)),
        ("--num-distributed-optimizer-instances 2", (2, 2, 4)),
        ("--num-distributed-optimizer-instances 2 --asynchzp-optim-shard-size 8", (2, 2, 8)),
        ("--data-parallel-sharding-strategy optim", (2, 2, 8)),
    ],
)
def test_the_flags_of_other_wrappers_become_sizes_unless_ours_are_given(
    parse, monkeypatch, line, expected
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = parse(line)
    lines = prepare_args(args)
    assert tuple(getattr(args, f"asynchzp_{s}_shard_size") for s in STATES) == expected
    assert args.num_distributed_optimizer_instances == 1 and not args.use_megatron_fsdp
    is_translated = "fsdp" in line or "instances" in line
    assert sum("--asynchzp-optim-shard-size" in one for one in lines[:1]) == is_translated


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--tensor-parallel-num-weight-shards 4", (4, 4, 8)),
        ("--tensor-parallel-num-weight-shards 8", (8, 8, 8)),
        ("--tensor-parallel-num-weight-shards 1", (2, 2, 8)),
        ("--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 4", (2, 2, 4)),
        ("--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 2", (1, 1, 4)),
        ("--context-parallel-size 2 --tensor-parallel-num-weight-shards 4", (4, 4, 8)),
        ("--tensor-parallel-num-weight-shards 4 --asynchzp-grad-shard-size 8", (4, 8, 8)),
        (
            "--tensor-parallel-num-weight-shards 4 --num-distributed-optimizer-instances 2",
            (4, 4, 4),
        ),
        ("--tensor-parallel-num-weight-shards 4 --use-torch-fsdp2", (8, 8, 8)),
        ("--num-experts 4 --expert-tensor-parallel-num-weight-shards 4", (4, 4, 8)),
        (
            "--num-experts 4 --tensor-parallel-num-weight-shards 8 "
            "--expert-tensor-parallel-num-weight-shards 2",
            (8, 8, 8),
        ),
        (
            "--num-experts 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
            "--disable-bias-linear --expert-tensor-parallel-num-weight-shards 4",
            (4, 4, 4),
        ),
    ],
)
def test_shards_of_weights_of_generalized_tensor_parallelism_become_sizes(
    parse, monkeypatch, line, expected
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = parse(line)
    asked = [
        getattr(args, name)
        for name in (
            "tensor_parallel_num_weight_shards",
            "expert_tensor_parallel_num_weight_shards",
        )
        if (getattr(args, name) or 0) > args.tensor_model_parallel_size
    ]
    said = [one for one in prepare_args(args) if "num-weight-shards" in one]
    assert tuple(getattr(args, f"asynchzp_{s}_shard_size") for s in STATES) == expected
    assert len(said) == bool(asked) and all(f"shards {number}" in said[0] for number in asked)
    assert not asked or args.tensor_parallel_num_weight_shards is None
    assert not asked or args.expert_tensor_parallel_num_weight_shards is None


@pytest.mark.parametrize(
    "line, fault",
    [
        ("--tensor-parallel-num-weight-shards 3", "3 shards, which do not divide the 8 ranks"),
        (
            "--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 16",
            "16 asks for 8 shards, which do not divide the 4 ranks",
        ),
    ],
)
def test_shards_of_weights_that_cannot_be_are_refused(parse, line, fault):
    args = parse(line)
    before = vars(args).copy()
    with pytest.raises(ConfigurationError, match="^--tensor-parallel-num-weight-shards") as refused:
        prepare_args(args)
    assert fault in str(refused.value) and vars(args) == before


def test_a_rule_is_heard_in_place_of_the_flags_of_other_wrappers(parse, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = parse("--use-torch-fsdp2 --asynchzp-param-shard-size node")
    prepare_args(args)
    assert tuple(getattr(args, f"asynchzp_{s}_shard_size") for s in STATES) == (2, 8, 8)


def test_every_pair_of_rules_fits_every_group_or_shards_parameters_more_than_their_optimizer(parse):
    args = parse()
    for group_size, on_node in product(range(1, 25), range(1, 9)):
        for rules in product((None, "node", "world"), repeat=3):
            vars(args).update({f"asynchzp_{s}_shard_size": r for s, r in zip(STATES, rules)})
            is_fit = rules[2] != "node" or "world" not in rules[:2]
            try:
                resolve_shard_sizes(config_of(args), args, group_size, on_node).check(group_size)
            except ConfigurationError:
                assert not is_fit, (rules, group_size, on_node)


def test_instances_that_the_group_cannot_be_divided_into_are_refused(parse):
    with pytest.raises(ConfigurationError, match="^--num-distributed-optimizer-instances 3 does"):
        prepare_args(parse("--num-distributed-optimizer-instances 3"))


def test_sizes_are_taken_or_refused_in_one_line_with_the_values_that_nest(parse):
    args = parse()

    def resolve(sizes: dict[str, int]) -> ShardSizes:
        vars(args).update({f"asynchzp_{state}_shard_size": sizes[state] for state in sizes})
        return resolve_shard_sizes(config_of(args), args, 12, 4)

    for numbers in product(range(1, 14), repeat=3):
        sizes = dict(zip(STATES, numbers, strict=True))
        try:
            ShardSizes(**sizes).check(12)
        except ConfigurationError:
            with pytest.raises(ConfigurationError, match=r"\b12 ranks\b") as refused:
                resolve(sizes)
            assert "\n" not in str(refused.value)
            blamed = re.match(
                r"--asynchzp-(\w+)-.* nest .*valid values: ([\d, ]*\d)", str(refused.value)
            )
            for value in blamed[2].split(", ") if blamed else ():
                assert resolve(sizes | {blamed[1]: int(value)})
        else:
            assert resolve(sizes) == ShardSizes(**sizes)


def test_the_defaults_fit_every_group(parse):
    args = parse()
    for group_size, ranks_per_node in product(range(1, 25), range(1, 9)):
        sizes = resolve_shard_sizes(config_of(args), args, group_size, ranks_per_node)
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
    assert sharding_ranks_per_node(parse(line, world_size)) == expected
