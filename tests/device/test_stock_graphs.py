# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of stock Megatron's CUDA graphs (megatron-core 0.19), most of them of its own ones
(--cuda-graph-impl local), without this package: each run would show that one is gone."""

from collections.abc import Sequence

import pytest

from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from scripts.testbed.megatron_flags import PIPELINE_PARALLEL
from scripts.testbed.megatron_runs import Steps, on_device, run_pretrain
from tests.device.test_megatron_graphs import COMMON, EXPERTS, FORMS, HYBRID, OWN, ROUTER, TE
from tests.device.test_transformer_engine import RECIPES

pytestmark = pytest.mark.slow

GRAPHS = ["--cuda-graph-impl", OWN, "--cuda-graph-warmup-steps", "1"]


def train(lines: Sequence[Sequence[str]]) -> list[Steps]:
    with on_device(uses_te=True):
        return [run_pretrain([*COMMON, *line]).losses_and_norms for line in lines]


def test_all_goes_on_on_a_stream_that_has_not_waited_for_the_one_before(te_worlds: DeviceWorlds):
    with pytest.raises(DeviceFailure, match="stream 0, the default.*nothing orders the two"):
        te_worlds.run(train, 2, [["--bf16", *GRAPHS]], timeout_s=300)


@pytest.mark.parametrize("more", [FORMS["dropout"], RECIPES["delayed"]], ids=["dropout", "scales"])
def test_the_capture_draws_random_numbers_and_changes_scales(te_worlds: DeviceWorlds, more):
    line = ["--bf16", *more]
    for eager, graphed in te_worlds.run(
        train, 2, [line, [*line, *GRAPHS]], timeout_s=300, watches=False
    ):
        assert len(eager) == len(graphed) == 3 and eager[1:] != graphed[1:]


def test_a_pipeline_ends_where_it_would_free_what_it_has_sent(te_worlds: DeviceWorlds):
    line = ["--bf16", "--num-layers", "4", *PIPELINE_PARALLEL, *GRAPHS]
    with pytest.raises(DeviceFailure, match="counter-productive to free a view"):
        te_worlds.run(train, 4, [line], timeout_s=300, watches=False)


def test_around_experts_a_graph_reads_indices_that_were_not_kept(te_worlds: DeviceWorlds):
    hybrid = [*HYBRID, "--hybrid-layer-pattern", "M*E*E", *EXPERTS]
    line = ["--bf16", *hybrid, *GRAPHS, "--cuda-graph-modules", "moe_router", "moe_preprocess"]
    with pytest.raises(DeviceFailure, match="index .* is out of bounds"):
        te_worlds.run(train, 2, [line], timeout_s=300, watches=False)


def test_a_graph_without_fused_gradients_loses_those_that_come_late(te_worlds: DeviceWorlds):
    line = ["--bf16", *EXPERTS, "--num-layers", "2", "--no-gradient-accumulation-fusion"]
    line += ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"]
    graphs = [*ROUTER, "--cuda-graph-impl", TE, "--cuda-graph-warmup-steps", "1"]
    for eager, graphed in te_worlds.run(train, 2, [line, [*line, *graphs]], timeout_s=500):
        assert graphed[0] == eager[0]
        assert graphed[1][1] != pytest.approx(eager[1][1], rel=0.01)
