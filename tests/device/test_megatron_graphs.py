# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's layers as CUDA graphs, of Transformer Engine and of its own, inside the engine on the
emulated device: the bits of the same run without graphs, in every loss, norm and main parameter."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import PIPELINE_PARALLEL, size_flags
from scripts.testbed.megatron_runs import RunRecord, Steps, on_device, run_pretrain
from tests.device.test_transformer_engine import (
    BASE,
    CODES,
    FUSED,
    FUSES_EXPERTS,
    GROUPED_EXPERTS,
    RECIPES,
    codes_of,
    env_of,
)

pytestmark = pytest.mark.slow

# fmt: off
COMMON = [*BASE, "--num-layers", "5", "--train-iters", "3", "--te-rng-tracker"]
TE, OWN = "transformer_engine", "local"
CAPACITY = ["--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity"]
HYBRID = ["--hybrid-layer-pattern", "M-M*M", "--mamba-head-dim", "32", "--mamba-state-dim", "16",
          "--mamba-num-groups", "1", "--mamba-num-heads", "8", "--disable-bias-linear",
          "--normalization", "RMSNorm"]
EXPERTS = [*GROUPED_EXPERTS, "--expert-model-parallel-size", "2",
           "--moe-shared-expert-intermediate-size", "64"]
# fmt: on


class Run(NamedTuple):
    """num_graphs: forward and backward of one micro-batch of a layer, counted once; params: of each
    unit, a checksum of what this rank's optimizer holds; seats: bytes for gathered parameters, as
    they are, by the formula and by the planner."""

    steps: Steps
    num_graphs: int
    params: list[int]
    seats: tuple[int, int, float]
    validation_loss: float | None


def seen(model_chunks: list, optimizer: Any) -> tuple[int, list[int], tuple[int, int, float]]:
    from megatron.core.parallel_state import get_pipeline_model_parallel_rank
    from megatron.training import get_args

    from megatron_asynchzp.mcore.run.planned import costing_of

    layers = [layer for chunk in model_chunks for layer in chunk.modules()]
    units = [unit for chunk in model_chunks for unit in chunk.units]
    params = [unit.main_param.storage.view(torch.int32).sum().item() for unit in units]
    allocated = sum(chunk.runtime.gathers.arena.nbytes for chunk in model_chunks)
    formula = sum(chunk.runtime.memory.params for chunk in model_chunks)
    runners = [one for layer in layers for one in getattr(layer, "cudagraph_runners", ())]
    graphs = sum(len(getattr(layer, "cuda_graphs", ())) for layer in layers)
    graphs += sum(runner.bwd_graph is not None for runner in runners)
    memory = costing_of(get_args()).stage_memory(get_pipeline_model_parallel_rank())
    planned = memory.in_flight.get("gathered parameters", 0.0)
    return graphs, params, (allocated, formula, planned)


def train(line: Sequence[str]) -> Run:
    with on_device(uses_te=True):
        record: RunRecord = run_pretrain(list(line), inspect=seen)
    return Run(record.losses_and_norms, *record.inspected, record.validation_loss)


def with_and_without[R](
    train: Callable[[Sequence[str]], R],
    line: Sequence[str],
    graphs: Sequence[str],
    laws: Sequence[Delays],
) -> list[R]:
    """Without graphs and delays, and with graphs under each law."""
    from scripts.testbed.device import inside

    runs = [train(line)]
    for law in laws:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        runs.append(train([*line, *graphs]))
    return runs


def whole_and_resumed[R](
    train: Callable[[Sequence[str]], R],
    line: Sequence[str],
    graphs: Sequence[str],
    folder: str,
    interval: int,
    step: int,
) -> list[R]:
    """Without graphs; with them, saved at each interval; and gone on with from `step`."""
    saved = [*graphs, "--save", folder, "--save-interval", str(interval)]
    loaded = [*graphs, "--load", folder, "--ckpt-step", str(step)]
    return [train([*line, *more]) for more in ([], saved, loaded)]


def graphs_of(impl: str) -> list[str]:
    return ["--cuda-graph-impl", impl, "--cuda-graph-warmup-steps", "1"]


def compare(
    worlds: DeviceWorlds,
    more: Sequence[str],
    sizes: Sequence[int],
    laws: Sequence[Delays] = (Delays(),),
    num_ranks: int = 2,
    env: dict[str, str] | None = None,
    impl: str = TE,
) -> None:
    line = [*COMMON, *more, *size_flags(sizes)]
    args = num_ranks, train, line, graphs_of(impl), laws
    for eager, *graphed in worlds.run(with_and_without, *args, timeout_s=590, env=env):
        assert eager.num_graphs == 0
        assert len({loss for loss, _ in eager.steps}) in (1, 3)  # a stage without a loss has None
        for run in graphed:
            assert run.num_graphs > 0
            assert run.steps == eager.steps
            assert run.params == eager.params
            assert run.validation_loss == eager.validation_loss
            assert run.seats[0] == run.seats[1] == run.seats[2] <= 1.15 * eager.seats[1]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2), (2, 2, 2), (1, 1, 2)])
def test_whole_layers_keep_their_bits_in_each_choice_of_shards(te_worlds: DeviceWorlds, sizes):
    compare(te_worlds, ["--bf16"], sizes)


@pytest.mark.parametrize("impl", [TE, OWN])
def test_a_run_goes_on_from_a_checkpoint_with_the_bits_of_the_whole_one(
    te_worlds: DeviceWorlds, tmp_path: Path, impl: str
):
    line = [*COMMON, "--bf16", "--train-iters", "4", *size_flags((1, 2, 2))]
    args = 2, train, line, graphs_of(impl), str(tmp_path), 2, 2
    for eager, saved, resumed in te_worlds.run(whole_and_resumed, *args, timeout_s=590):
        assert saved.num_graphs == resumed.num_graphs > 0
        assert saved.steps == eager.steps and resumed.steps == eager.steps[2:]
        assert saved.params == resumed.params == eager.params


ALL = ["--cuda-graph-modules", "attn", "moe_router", "moe_preprocess"]
ROUTER = ["--cuda-graph-modules", "moe_router", "moe_preprocess"]
# fmt: off
OVERLAPPED = {
    "router": [*GROUPED_EXPERTS, "--expert-model-parallel-size", "2", *ROUTER, "--bf16"],
    "router, shared experts": [*EXPERTS, *ROUTER, "--bf16"],
    "attention, router, shared experts": [*EXPERTS, *ALL, "--bf16"],
    "mxfp8, as codes": [*EXPERTS, *ALL, *RECIPES["mxfp8"], *CODES,
        "--reuse-grad-buf-for-mxfp8-param-ag", "--use-distributed-optimizer"],
    "fused experts": [*EXPERTS, *ALL, "--bf16", *FUSED],
}
# fmt: on


@pytest.mark.parametrize("form", OVERLAPPED)
def test_captured_parts_keep_their_bits_in_the_overlapped_schedule(te_worlds: DeviceWorlds, form):
    """With late weight gradients; under every law of delay with shared experts."""
    more = [*OVERLAPPED[form], "--num-layers", "2"]
    more += ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"]
    laws = [Delays(law, seed) for seed, law in enumerate(LAWS) if law != "none"]
    laws = laws if form == "router, shared experts" else laws[:1]
    env = FUSES_EXPERTS | env_of("mxfp8" * ("mxfp8" in form))
    compare(te_worlds, more, (2, 2, 2), laws, env=env)


# fmt: off
FORMS = {
    "attention": ["--cuda-graph-modules", "attn"],
    "mlp": ["--cuda-graph-modules", "mlp"],
    "router": [*EXPERTS, "--cuda-graph-modules", "moe_router"],
    "router and preprocessing": [*GROUPED_EXPERTS, "--cuda-graph-modules", "moe_router",
                                 "moe_preprocess"],
    "attention, router and preprocessing": [*EXPERTS, "--cuda-graph-modules", "attn",
                                            "moe_router", "moe_preprocess"],
    "experts": [*CAPACITY, *EXPERTS, "--cuda-graph-modules", "moe"],
    "whole layers with experts": [*CAPACITY, *EXPERTS],
    "whole layers with experts of one rank": [*CAPACITY, *GROUPED_EXPERTS],
    "Mamba layers": [*HYBRID],
    "Mamba and attention": [*HYBRID, "--cuda-graph-modules", "mamba", "attn"],
    "dropout": ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"],
    "one micro-batch": ["--global-batch-size", "2"],
    "evaluation": ["--eval-iters", "1", "--eval-interval", "2"],
    "recomputation": ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"],
    "gradients in bf16": ["--grad-reduce-in-bf16"],
}
# fmt: on


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_layers_experts_and_other_runs_keep_their_bits(te_worlds: DeviceWorlds, form):
    compare(te_worlds, ["--bf16", *FORMS[form]], (2, 2, 2), [Delays("uniform", 1)])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2), (2, 2, 4)])
def test_sharded_experts_within_a_graph_keep_their_bits(te_worlds: DeviceWorlds, sizes):
    law = Delays("slow-rank", sum(sizes))
    compare(te_worlds, ["--bf16", *CAPACITY, *EXPERTS], sizes, [law], num_ranks=4)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4"])
def test_layers_that_compute_in_fp8_and_fp4_keep_their_bits(te_worlds: DeviceWorlds, recipe):
    """Gathered as codes where that changes no bit."""
    compare(te_worlds, [*RECIPES[recipe], *codes_of(recipe)], (2, 2, 2), env=env_of(recipe))


# ---- Megatron's own


DROPOUT_AND_EVALUATION = [*FORMS["dropout"], *FORMS["evaluation"]]
OWN_FORMS = ["whole layers with experts", "Mamba layers", "one micro-batch", "recomputation"]


@pytest.mark.parametrize(
    "more",
    [DROPOUT_AND_EVALUATION, FORMS["gradients in bf16"], *(FORMS[form] for form in OWN_FORMS)],
    ids=["dropout and evaluation", "gradients in bf16", *OWN_FORMS],
)
def test_megatrons_own_graphs_of_other_runs_keep_the_bits(te_worlds: DeviceWorlds, more):
    compare(te_worlds, ["--bf16", *more], (2, 2, 2), [Delays("slow-stream", 1)], impl=OWN)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_megatrons_own_graphs_in_fp8_and_fp4_keep_the_bits(te_worlds: DeviceWorlds, recipe):
    compare(
        te_worlds, [*RECIPES[recipe], *codes_of(recipe)], (2, 2, 2), env=env_of(recipe), impl=OWN
    )


@pytest.mark.parametrize("more", [[], ["--num-layers-per-virtual-pipeline-stage", "1"]])
def test_megatrons_own_graphs_of_pipelines_keep_the_bits(te_worlds: DeviceWorlds, more):
    pipeline = ["--num-layers", "4", *PIPELINE_PARALLEL, *more]
    compare(te_worlds, ["--bf16", *pipeline], (2, 2, 2), num_ranks=4, impl=OWN)
