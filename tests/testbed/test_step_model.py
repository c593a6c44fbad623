# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The cost model of a step: laws that hold for every cluster, network and model."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench.scaling_points import slowed
from scripts.bench.step_model import (
    HSDP,
    SYSTEMS,
    AsyncHZP,
    DistributedOptimizer,
    ModelledRun,
    ZeRO3,
)
from scripts.testbed.profile import NetworkProfile

speeds = st.floats(0.01, 100)
profiles = st.builds(
    NetworkProfile,
    inter_gbit=speeds,
    intra_gbit=speeds,
    inter_latency_us=st.floats(0, 1e3),
    intra_latency_us=st.floats(0, 1e3),
)
runs = st.builds(
    ModelledRun,
    profile=profiles,
    nodes=st.integers(1, 6),
    ranks_per_node=st.integers(1, 4),
    layers=st.integers(1, 6),
    layer_numel=st.integers(1, 10**6),
    layer_ms=st.floats(0.1, 100),
    micro_batches=st.integers(1, 3),
    embedding_numel=st.integers(0, 10**6),
    head_numel=st.integers(0, 10**6),
)
systems = st.sampled_from(SYSTEMS)


@given(systems, runs)
def test_a_step_is_as_long_as_its_computation_and_as_the_busy_time_of_a_nodes_link(system, run):
    one = system(run)
    link_ms = one.node_nbytes() * 8e-6 / run.profile.inter_gbit
    assert one.step_ms() >= (1 - 1e-9) * max(run.compute_ms, link_ms)


@given(systems, runs)
def test_a_step_is_at_most_everything_one_after_the_other(system, run):
    """Nothing is counted twice: the model only overlaps."""
    uses = run.micro_batches * 2 * len(run.units) + 2 * len(run.units)
    slowest_ms = max(
        length
        for unit in run.units
        for _, length in (
            run.flat(unit.nbytes),
            run.in_node(unit.nbytes),
            run.across_nodes(unit.nbytes),
        )
    )
    assert system(run).step_ms() <= (1 + 1e-9) * (run.compute_ms + 2 * uses * slowest_ms)


@given(systems, runs)
def test_where_the_network_takes_no_time_a_step_is_its_computation(system, run):
    free = replace(run, profile=NetworkProfile(inter_gbit=inf, intra_gbit=inf))
    assert system(free).step_ms() == pytest.approx(run.compute_ms)


@given(systems, runs, st.floats(1, 10))
def test_in_slow_motion_a_step_is_that_many_times_as_long(system, run, factor):
    slow = replace(run, profile=slowed(run.profile, factor), layer_ms=factor * run.layer_ms)
    assert system(slow).step_ms() == pytest.approx(factor * system(run).step_ms())


@given(systems, runs, st.floats(1, 10), st.floats(1, 10))
def test_a_faster_network_never_makes_a_step_longer(system, run, inter, intra):
    profile = run.profile
    faster = replace(
        profile, inter_gbit=inter * profile.inter_gbit, intra_gbit=intra * profile.intra_gbit
    )
    assert system(replace(run, profile=faster)).step_ms() <= (1 + 1e-9) * system(run).step_ms()


@given(runs)
def test_what_leaves_a_node_follows_from_what_is_shared(run):
    output = {system: system(run).node_nbytes() for system in SYSTEMS}
    if run.nodes == 1:
        assert set(output.values()) == {0.0}
        return
    assert output[AsyncHZP] == output[HSDP] == 2 * (run.nodes - 1) / run.nodes * run.nbytes
    assert output[AsyncHZP] <= (1 + 1e-9) * output[DistributedOptimizer]
    per_batch = output[ZeRO3] / run.micro_batches / output[DistributedOptimizer]
    assert 0.5 <= per_batch <= 1.5  # least where there is one layer and nothing else


@given(runs)
def test_memory_falls_with_nodes_where_something_is_shared_over_them(run):
    more = replace(run, nodes=2 * run.nodes)
    for system in (DistributedOptimizer, ZeRO3, AsyncHZP):
        assert system(more).state_nbytes() < system(run).state_nbytes()
    assert HSDP(more).state_nbytes() == HSDP(run).state_nbytes()


@given(runs)
def test_on_one_node_hsdp_is_zero_3(run):
    alone = replace(run, nodes=1)
    assert HSDP(alone).step_ms() == pytest.approx(ZeRO3(alone).step_ms())
    assert HSDP(alone).state_nbytes() == ZeRO3(alone).state_nbytes()


def test_a_run_by_hand():
    """Two layers of 1 MB on two nodes: 8 ms a megabyte and direction."""
    profile = NetworkProfile(inter_gbit=1.0, intra_gbit=inf)
    run = ModelledRun(profile, 2, 1, layers=2, layer_numel=250_000, layer_ms=10.0)
    assert run.across_nodes(1_000_000) == ("between", 4.0)
    # The last layer's gradients and the first layer's parameters are waited for.
    assert AsyncHZP(run).step_ms() == pytest.approx(run.compute_ms + 2 * 4.0)
