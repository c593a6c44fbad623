# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Shard sizes that are auto: what is chosen, and one line for what cannot be."""

from dataclasses import replace

import pytest

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner.cluster import GIB
from megatron_asynchzp.planner.cluster_files import cluster_toml, load_cluster
from scripts.testbed.megatron_flags import flags_of

STATES = ("param", "grad", "optim")
# fmt: off
FLAGS = [
    "--use-asynchzp", "--mock-data", "--bf16", *flags_of({
        "num-layers": 8, "hidden-size": 4096, "num-attention-heads": 32, "seq-length": 4096,
        "max-position-embeddings": 4096, "vocab-size": 32000, "micro-batch-size": 1,
        "global-batch-size": 512, "tokenizer-type": "NullTokenizer",
    }),
]
# fmt: on


@pytest.fixture
def cluster(tmp_path):
    """Eight nodes of four between which little gets through."""
    known = replace(load_cluster("a100"), nodes=8, ranks_per_node=4)
    file = tmp_path / "mine.toml"
    file.write_text(cluster_toml(replace(known, between=replace(known.between, gb_s=5.0, cards=1))))
    return str(file)


def chosen(more: list[str], rank: int = 0, ranks: int = 32) -> tuple[tuple[int, ...], list[str]]:
    """The sizes of a rank of nodes of four, and what it logs."""
    from megatron_asynchzp.commands import pretended_world

    args, lines = pretended_world.parse([*FLAGS, *more], ranks, 4)
    sizes = (getattr(args, f"asynchzp_{state}_shard_size") for state in STATES)
    return tuple(sizes), [line for line in lines if "chosen" in line]


def test_sizes_that_are_auto_are_chosen_for_the_cluster_and_logged_in_one_line(cluster):
    given = ["--asynchzp-cluster", cluster]
    sizes, lines = chosen([*given, "--asynchzp-param-shard-size", "auto"])
    param, _, optim = sizes
    assert param <= 4 and optim % 4 == 0 and optim > 4  # hierarchy: gathers stay in a node
    (line,) = lines
    for state, size in zip(STATES, sizes, strict=True):
        assert f"--asynchzp-{state}-shard-size {size}" in line
    kept = [*given, "--asynchzp-param-shard-size", "auto", "--asynchzp-optim-shard-size", "16"]
    assert chosen(kept)[0][2] == 16
    kept = [*given, "--asynchzp-grad-shard-size", "1", "--asynchzp-optim-shard-size", "auto"]
    assert chosen(kept)[0][1] == 1


def test_numbers_need_no_cluster_and_are_chosen_by_nobody():
    assert chosen(["--asynchzp-param-shard-size", "2"]) == ((2, 4, 32), [])


@pytest.mark.parametrize("more, line", [
    ("--asynchzp-param-shard-size auto --asynchzp-cluster h1000",
     "h1000: no cluster of that name; the nearest is h100"),
    ("--asynchzp-param-shard-size auto --asynchzp-cluster h100",
     "h100: its nodes have 8 ranks, those of this run 4"),
    ("--asynchzp-param-shard-size auto --asynchzp-grad-shard-size 3 --asynchzp-cluster h100",
     "--asynchzp-grad-shard-size 3 does not divide"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused_in_one_line(more, line):
    with pytest.raises(ConfigurationError) as refused:
        chosen(more.split())
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_model_that_fits_nowhere_is_refused_with_the_flag_and_the_cluster(tmp_path):
    small = load_cluster("a100")
    small = replace(small, device=replace(small.device, memory_gib=1.0, reserved_gib=0.5))
    file = tmp_path / "small.toml"
    file.write_text(cluster_toml(replace(small, nodes=8, ranks_per_node=4)))
    given = f"--asynchzp-param-shard-size auto --asynchzp-cluster {file}"
    with pytest.raises(ConfigurationError, match=r"auto: none of \d+ plans fits into the 1 GiB"):
        chosen(given.split())


def test_a_cap_below_what_a_layer_needs_rules_out_its_plans_and_names_the_flag_where_all_are(
    cluster,
):
    auto = ["--asynchzp-cluster", cluster, "--asynchzp-param-shard-size", "auto"]
    layer = 202 * 10**6 * (2 + 4) / GIB  # its parameters, and half of their gradients
    (param, _, _), _ = chosen([*auto, "--asynchzp-memory-in-flight-gb", f"{layer / 5}"])
    assert param == 1  # where nothing is gathered, a slot of gradients is enough
    with pytest.raises(ConfigurationError, match="--asynchzp-memory-in-flight-gb: memory in"):
        chosen([*auto, "--asynchzp-memory-in-flight-gb", "0.01", "--asynchzp-grad-shard-size", "4"])
