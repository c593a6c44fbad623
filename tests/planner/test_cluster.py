# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Files of clusters: what they hold, one line for each fault, and times that follow from links."""

import tomllib
from dataclasses import replace

import pytest

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner.cluster import Cluster, Cost, Device, Link, Ring
from megatron_asynchzp.planner.cluster_files import (
    cluster_names,
    cluster_toml,
    load_cluster,
    read_cluster,
)
from scripts.testbed.profile import PROFILES

FLAT = Cluster("flat", 2, 4, Device(100, 80), Link(10.0), Link(1.0))


def test_every_named_cluster_loads_and_is_written_and_read_again():
    assert {"h100", "h200", "a100", "ascend"} <= set(cluster_names())
    for name in cluster_names():
        cluster = load_cluster(name)
        assert read_cluster(tomllib.loads(cluster_toml(cluster)), "again") == cluster


@pytest.mark.parametrize("part, is_doubted", [
    (0.02, True), (0.099, True), (0.1, False), (0.5, False), (1.0, False), (1.3, True),
])  # fmt: skip
def test_an_efficiency_that_no_layer_has_gets_one_line_with_the_peak_that_it_is_of(
    part, is_doubted
):
    doubts = replace(FLAT, device=Device(989, 80, part)).doubts
    assert len(doubts) == is_doubted
    assert all(f"{part:.2g} of device.tflops 989" in line for line in doubts)


@pytest.mark.parametrize("text", ['"quoted"', "two\nlines", "back\\slash", "größer", "tab\t"])
def test_any_text_in_a_cluster_is_read_as_it_was_written(text):
    named = replace(FLAT, name=text, source=text)
    assert read_cluster(tomllib.loads(cluster_toml(named)), "again") == named


def test_the_test_beds_clusters_have_the_speeds_of_its_profiles():
    names = [name for name in cluster_names() if name.startswith("testbed-")]
    assert len(names) >= 3
    for name in names:
        cluster, profile = load_cluster(name), PROFILES[name.removeprefix("testbed-")]
        for link, is_inter in ((cluster.inside, False), (cluster.between, True)):
            assert 8 * link.gb_s == pytest.approx(profile.gbit(is_inter))
            assert link.latency_us == pytest.approx(1e6 * profile.latency_s(is_inter))
        assert cluster.inside.shared and cluster.between.cards == 1 and not cluster.runs_ahead


FAULTS = [
    ("nodes = 2", "", "nodes: is missing"),
    ("nodes = 2", "nodes = 0", "nodes: 0 is not a whole number"),
    ("nodes = 2", "nodes = 2.5", "nodes: 2.5 is not a whole number"),
    ("tflops = 100", "tflops = -1", "device.tflops: -1 is not a number above 0"),
    ("tflops = 100", 'tflops = "fast"', "device.tflops: 'fast' is not a number"),
    ("tflops = 100", "tflops = nan", "device.tflops: nan is not a number"),
    ("tflops = 100", "", "device.tflops: is missing"),
    (
        "reserved_gib = 4.0",
        "reserved_gib = 90",
        "device.reserved_gib: leaves nothing of memory_gib",
    ),
    ("efficiency = 0.5", "efficiency = 1.5", "device.efficiency: 1.5 is not a number above 0"),
    ("gb_s = 10.0", "gb_s = 0", "inside.gb_s: 0 is not a number above 0"),
    ("gb_s = 10.0", "gbs = 10.0", "inside.gbs: is not one of cards, efficiency, gb_s"),
    ("[[1.0, 1.0]]", "[[2, 1.0], [1, 1.0]]", "inside.efficiency: is not a list of [bytes, part]"),
    ("shared = false", "shared = 1", "inside.shared: 1 is neither true nor false"),
    ("cards = 1", "cards = 0", "inside.cards: 0 is not a whole number"),
    ("imbalance = 0.0", "imbalance = -0.1", "imbalance: -0.1 is not a number of at least 0"),
    ("[device]", "[gpu]", "gpu: is not one of"),
    ("nodes = 2", "nodes = = 2", "not a TOML file"),
]


@pytest.mark.parametrize("old, new, line", FAULTS)
def test_a_fault_in_a_file_is_one_line_with_the_file_and_the_field(tmp_path, old, new, line):
    text = cluster_toml(replace(FLAT, device=Device(100, 80)))
    assert old in text.replace("100.0", "100")
    file = tmp_path / "mine.toml"
    file.write_text(text.replace("tflops = 100.0", "tflops = 100").replace(old, new, 1))
    with pytest.raises(ConfigurationError) as caught:
        load_cluster(str(file))
    message = str(caught.value)
    assert message.startswith(f"{file}: ") and line in message and "\n" not in message


def test_an_unknown_name_lists_those_that_there_are():
    with pytest.raises(
        ConfigurationError,
        match=r"^h1000: no cluster of that name; the nearest is h100; give one of a100",
    ):
        load_cluster("h1000")


def test_ranks_that_do_not_fill_the_last_node_are_refused_with_those_that_do():
    assert FLAT.with_ranks(2).ranks_per_node == 2 and FLAT.with_ranks(16).nodes == 4
    with pytest.raises(ConfigurationError, match="give 8 or 12"):
        FLAT.with_ranks(10)


def test_a_ring_is_as_slow_as_its_slowest_link_and_links_within_a_node_are_each_ranks_own():
    nbytes = 8e9
    inside = Ring.of_axis(4, 1, 4).turn(nbytes, FLAT).alone_s
    assert inside == pytest.approx(0.75 * 8 / 10)
    flat = Ring.of_axis(8, 1, 4).turn(nbytes, FLAT).alone_s
    assert flat == pytest.approx(7 / 8 * 8 / 1)
    # All four ranks of a node cross to the other node at once, each with a ring of its own.
    across = Ring.of_axis(2, 4, 4).turn(nbytes, FLAT).alone_s
    assert across == pytest.approx(4 * 0.5 * 8 / 1)
    shared = replace(FLAT, inside=replace(FLAT.inside, shared=True))
    assert Ring.of_axis(4, 1, 4).turn(nbytes, shared).alone_s == pytest.approx(4 * inside)
    # Three of a node's four ranks share its link, the last one sends to the other node.
    slow = replace(FLAT, inside=replace(FLAT.inside, gb_s=0.1, shared=True))
    flat = Ring.of_axis(8, 1, 4).turn(nbytes, slow).alone_s
    assert flat == pytest.approx(3 * 7 / 8 * 8 / 0.1)


def test_cards_add_up_and_latency_is_paid_on_every_hop_of_a_turn():
    four = replace(FLAT, between=replace(FLAT.between, cards=4, latency_us=100.0))
    assert Ring.of_axis(8, 1, 4).turn(8e9, four).alone_s == pytest.approx(7 / 4 + 100e-6)
    assert Ring.of_axis(8, 4, 4).turn(0.0, replace(four, nodes=8)).alone_s == pytest.approx(
        7 * 100e-6
    )


def test_few_bytes_go_along_a_tree_between_nodes_where_a_cluster_has_trees_and_many_along_a_ring():
    """NCCL's PAT needs one rank a node; its tree for sums does not."""
    between = Link(50.0, latency_us=14.0, start_us=8.4, cards=8, trees=True)
    cluster = replace(FLAT, between=between, ranks_per_node=8, nodes=2048)
    alone, flat = Ring.of_axis(2048, 8, 8), Ring.of_axis(16384, 1, 8)
    short, long = 1e6, 1e12
    assert alone.gather(short, cluster).latency_s == pytest.approx(
        1e-6 * (8.4 + 11 * 14 / 3.5 + 2048 * 2.8)
    )
    assert alone.gather(short, cluster).alone_s < 0.3 * alone.turn(short, cluster).alone_s
    assert alone.gather(long, cluster) == alone.turn(long, cluster)
    assert flat.gather(short, cluster) == flat.turn(short, cluster)
    assert flat.all_reduce(short, cluster).latency_s < 0.1 * flat.turn(short, cluster).latency_s
    ringed = replace(cluster, between=replace(between, trees=False))
    twice = [2 * part for part in alone.turn(short, ringed)]
    assert list(alone.all_reduce(short, ringed)) == twice
    assert alone.gather(short, ringed) == alone.turn(short, ringed)


def test_ranks_that_share_a_link_fill_each_others_latencies_but_for_the_last_hop():
    def cost(nbytes: float, shared: bool) -> Cost:
        inside = replace(FLAT.inside, latency_us=1000.0, shared=shared)
        return Ring.of_axis(4, 1, 4).turn(nbytes, replace(FLAT, inside=inside))

    assert cost(8e9, shared=False) == pytest.approx((0.6, 3e-3))
    assert cost(8e9, shared=True) == pytest.approx((4 * 0.6, 1e-3))
    assert cost(0.0, shared=True) == pytest.approx((0.0, 3e-3))  # nobody has anything to send


def test_what_a_link_reaches_grows_with_the_message_along_its_curve():
    link = Link(10.0, efficiency=((1e3, 0.1), (1e5, 0.5), (1e6, 0.9)))
    reached = [link.reached(10.0**power) / 1e10 for power in range(2, 9)]
    assert reached == pytest.approx([0.1, 0.1, 0.3, 0.5, 0.9, 0.9, 0.9])


def test_a_domain_of_several_nodes_is_one_large_node_with_all_their_cards():
    """Whatever an axis is, and however it is used."""
    parted = replace(FLAT, nodes=8, nodes_per_domain=4, between=replace(FLAT.between, cards=2))
    joined = replace(
        parted,
        nodes=2,
        ranks_per_node=16,
        nodes_per_domain=1,
        between=replace(FLAT.between, cards=8),
    )
    assert parted.num_ranks == joined.num_ranks == 32
    for size, distance in ((32, 1), (16, 1), (8, 4), (2, 16), (4, 8)):
        rings = [Ring.of_axis(size, distance, one.ranks_per_domain) for one in (parted, joined)]
        assert rings[0] == rings[1]
        for kind in ("gather", "all_reduce", "exchange", "turn"):
            costs = [getattr(rings[0], kind)(1e8, one) for one in (parted, joined)]
            assert costs[0] == costs[1], (kind, size, distance)
    assert rings[0].gather(1e8, parted) != rings[0].gather(1e8, replace(parted, nodes_per_domain=2))


def test_parameters_of_gb200_are_planned_over_its_domain_and_not_over_a_host():
    cluster = load_cluster("gb200")
    assert (cluster.ranks_per_node, cluster.ranks_per_domain) == (4, 72)
    assert cluster.with_ranks(8).ranks_per_domain == 8 and cluster.with_ranks(2).num_ranks == 2
    assert cluster.with_ranks(144).nodes_per_domain == 18
    with pytest.raises(ConfigurationError, match="do not fill domains of 72; .*nodes_per_domain"):
        cluster.with_ranks(256)
    assert replace(cluster, nodes_per_domain=16).with_ranks(256).ranks_per_domain == 64
