# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the planner makes of a command line: sizes that are auto, the plan command and a dry run
count the same bytes."""

from argparse import Namespace
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from megatron_asynchzp.commands import plan as command
from megatron_asynchzp.commands.stages import dry_run_of_flags
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.config import AUTO, STATES, AsyncHZPConfig
from megatron_asynchzp.mcore.run import planned
from megatron_asynchzp.mcore.run.settings import RunSettings, moment_nbytes_of
from megatron_asynchzp.planner.cluster import Cluster, Device, Link
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.space import Space, plans
from scripts.testbed.megatron_flags import flags_of
from tests.support import real_units
from tests.support.command_lines import random_flags

NUM_FAST, NUM_ALL = 20, 100


@pytest.fixture(autouse=True)
def quick_parser(monkeypatch):
    """Megatron's, which reads the help of its flags from its own sources each time; and what it
    demands of the environment beside tensor and context parallelism."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    read = ArgumentGroupFactory._get_field_docstrings
    monkeypatch.setattr(
        ArgumentGroupFactory, "_get_field_docstrings", lambda _, made_of: known(read, made_of)
    )
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@cache
def known(read: Callable, made_of: type) -> dict[str, str]:
    return read(SimpleNamespace(_get_field_docstrings=lambda base: known(read, base)), made_of)


def chosen_among(space: Space, wanted: Plan) -> Costing:
    """Of the plans that a command compares, the one that its user's flags describe."""
    (same,) = [plan for plan in plans(space) if plan == wanted]
    return space.costing(same)


def in_auto(args: Namespace, cluster: Cluster) -> Costing:
    """Of a run whose shard sizes are all auto."""
    auto = copy(args)
    auto.asynchzp_cluster = "h100"
    for state in STATES:
        setattr(auto, f"asynchzp_{state}_shard_size", AUTO)
    own = planned.plan_of(args, planned.setting_of(args))
    return chosen_among(planned.space_of(auto, cluster), own)


def in_plan(args: Namespace, cluster: Cluster) -> Costing:
    asked, _ = command.parse_args(["--cluster", "h100", "--", "pretrain_gpt.py"])
    space = command.space_of(planned.setting_of(args), args, asked, cluster)
    return chosen_among(space, planned.plan_of(args, planned.setting_of(args)))


def check(seed: int) -> bool:
    """Whether the command line can run at all."""
    flags, ranks = random_flags(seed)
    per_node = min(ranks, 8)
    cluster = Cluster("c", ranks // per_node, per_node, Device(1.0, 80), Link(1.0), Link(1.0))
    try:
        dry = dry_run_of_flags(tuple(flags), ranks, per_node)
    except ConfigurationError as error:
        assert str(error).startswith("--asynchzp-memory-in-flight-gb: "), seed
        return False
    of_plans = [find(dry.args, cluster) for find in (in_auto, in_plan)]
    for index, chunks, groups in real_units.stages(dry.args):
        stage, where = dry.stages[index], (seed, index, " ".join(flags))
        assert real_units.numel_of(chunks) == stage.numel, where
        assert real_units.memory_of(index, chunks, groups, dry.args) == stage.memory, where
        for costing in of_plans:
            assert costing.stage_memory(index) == stage.memory, where
    assert {costing.memory.total for costing in of_plans} == {dry.fullest.memory.total}, seed
    return True


@pytest.mark.parametrize("part", range(2))
def test_auto_the_plan_command_and_the_dry_run_count_the_same_bytes_of_a_random_command_line(part):
    """At rest, in flight, kept, and of activations: as many as the run's own units."""
    assert sum(check(seed) for seed in range(part, NUM_FAST, 2)) >= 0.3 * NUM_FAST


@pytest.mark.slow
def test_they_do_of_100():
    assert sum(check(seed) for seed in range(NUM_FAST, NUM_ALL)) > 0.6 * (NUM_ALL - NUM_FAST)


@pytest.mark.parametrize("flags", [
    "--pipeline-model-parallel-layout Et*2|t*4L", "--pipeline-model-parallel-layout E|t|t*2|t*3L",
    "--pipeline-model-parallel-layout Et*3|t*3mL --mtp-num-layers 1 "
    "--position-embedding-type rope",
    "--decoder-first-pipeline-num-layers 2", "--decoder-last-pipeline-num-layers 1",
    "--num-layers 6 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split",
])  # fmt: skip
def test_layers_that_stages_share_out_unequally_are_where_megatron_builds_them(flags):
    shape = {
        "num-layers": 6, "hidden-size": 128, "num-attention-heads": 4, "seq-length": 128,
        "max-position-embeddings": 128, "vocab-size": 511, "tokenizer-type": "NullTokenizer",
        "micro-batch-size": 1, "global-batch-size": 16, "pipeline-model-parallel-size": 2,
    }  # fmt: skip
    words = ("--use-asynchzp", "--mock-data", "--bf16", *flags_of(shape), *flags.split())
    found = dry_run_of_flags(words, 8, 8)
    for index, chunks, groups in real_units.stages(found.args):
        assert real_units.numel_of(chunks) == found.stages[index].numel
        memory = real_units.memory_of(index, chunks, groups, found.args)
        assert memory == found.stages[index].memory


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_as_many_bytes_of_sgds_states_are_planned_as_it_has(momentum):
    param = torch.nn.Parameter(torch.ones(1000))
    param.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=momentum)
    optimizer.step()
    states = [state for state in optimizer.state[param].values() if state is not None]
    args = Namespace(optimizer="sgd", sgd_momentum=momentum)
    assert 1000 * moment_nbytes_of(args).all_params == sum(state.nbytes for state in states)


def test_a_run_that_trains_other_parameters_than_the_adapters_of_its_flags_is_refused():
    shape = {
        "num-layers": 6, "hidden-size": 128, "num-attention-heads": 4, "seq-length": 128,
        "max-position-embeddings": 128, "vocab-size": 511, "tokenizer-type": "NullTokenizer",
        "micro-batch-size": 1, "global-batch-size": 16, "ffn-hidden-size": 512,
    }  # fmt: skip
    adapters = ["--asynchzp-adapter-rank", "8", "--asynchzp-adapter-layers", "linear_fc1"]
    flags = ("--use-asynchzp", "--mock-data", *flags_of(shape), *adapters)
    args = dry_run_of_flags(flags, 2, 2).args
    described = 6 * 8 * (128 + 512)  # layers, rank, both ends of linear_fc1
    run = RunSettings.of_arguments(args)
    planned.refuse_other_adapters(args, run, 0, described)
    for other in (0, described - 1, described + 1, 2 * described):
        with pytest.raises(ConfigurationError) as refused:
            planned.refuse_other_adapters(args, run, 0, other)
        line = str(refused.value)
        assert f"{described:,} trained" in line and f"the model has {other:,}" in line
        assert "leave the flags out" in line and "\n" not in line
    nothing_described = replace(run, config=AsyncHZPConfig())
    planned.refuse_other_adapters(args, nothing_described, 0, 12345)


def test_sub_samples_are_counted_as_if_they_filled_what_a_rank_takes_at_most():
    """8 samples of 64 tokens over 4 ranks are 128 tokens a rank: 8 times 16."""
    batch, sample = {"micro_batch_size": 2, "global_batch_size": 8}, {"seq_length": 64}
    ranks = {"data_parallel_size": 2, "context_parallel_size": 2}
    hybrid = {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 16}
    counted = planned.batch_of(Namespace(**batch, **sample, **ranks, **hybrid))
    assert counted.tokens / ranks["context_parallel_size"] == 16
    assert counted.num_micro_batches == 8


@pytest.mark.parametrize(
    ("recipe", "is_1d", "more", "expected"),
    [
        ("mxfp8", "0", {}, (33 / 32, True)),
        ("mxfp8", "0", {"recompute_granularity": "full"}, ((33 / 32 + 2) / 2, True)),
        ("mxfp8", "0", {"overlap_moe_expert_parallel_comm": True}, ((33 / 32 + 2) / 2, True)),
        ("blockwise", "0", {}, (1 + 4 / 128**2, False)),
        ("nvfp4", "0", {"recompute_granularity": "full"}, (129 / 256, False)),
        ("nvfp4", "1", {}, (9 / 16, True)),
    ],
)
def test_bytes_of_a_code_are_counted_with_its_part_of_a_scale(
    monkeypatch, recipe, is_1d, more, expected
):
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", is_1d)
    fp4, fp8_recipe = ("e2m1", "delayed") if recipe == "nvfp4" else (None, recipe)
    flags = {"recompute_granularity": None, "overlap_moe_expert_parallel_comm": False} | more
    args = Namespace(fp4=fp4, fp8_recipe=fp8_recipe, **flags)
    wire = planned._wire(args, SimpleNamespace(grad_dtype=torch.float32, sends_codes=True))
    assert (wire.code_nbytes, wire.has_directions) == expected
