# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's graph of a whole iteration (--cuda-graph-impl full_iteration) with gathers and
reductions in it, on the emulated device: the bits of the same run without a graph."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import FULL_RECOMPUTE, TENSOR_PARALLEL, size_flags
from scripts.testbed.megatron_runs import Steps, on_device, run_pretrain
from tests.device.test_megatron_graphs import CAPACITY, whole_and_resumed, with_and_without
from tests.device.test_transformer_engine import BASE, GROUPED_EXPERTS, RECIPES, codes_of, env_of

pytestmark = pytest.mark.slow

# fmt: off
COMMON = [*BASE, "--num-layers", "2", "--train-iters", "5", "--te-rng-tracker",
          "--global-batch-size", "4"]
WHOLE = ["--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "2",
         "--no-check-for-nan-in-loss-and-grad"]
EVALUATION = ["--eval-iters", "2", "--eval-interval", "2"]
# Of ranks, sizes and more flags.
FORMS: dict[str, tuple[int, tuple[int, int, int], list[str]]] = {
    "whole parameters": (2, (1, 1, 2), []),
    "gradients in shards": (2, (1, 2, 2), []),
    "4 ranks": (4, (2, 2, 4), ["--global-batch-size", "8"]),
    "dropout": (2, (2, 2, 2), ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]),
    "evaluation": (2, (2, 2, 2), ["--train-iters", "8", *EVALUATION]),
    "recomputation": (2, (2, 2, 2), [*FULL_RECOMPUTE]),
    "padded experts": (2, (2, 2, 2), [*GROUPED_EXPERTS, *CAPACITY]),
    "tensor parallelism": (4, (2, 2, 2), [*TENSOR_PARALLEL, "--sequence-parallel"]),
    "kept parameters": (2, (2, 2, 2), ["--asynchzp-keep-params-gb", "0.001"]),
    "kept gradients": (2, (2, 2, 2), ["--asynchzp-keep-grads-gb", "0.001"]),
}
# fmt: on


class Run(NamedTuple):
    """params: of each unit, a checksum of what this rank's optimizer holds; graphs: which of
    training and evaluation have one; submitted: by the last step's micro-batches, to each lane."""

    steps: Steps
    params: list[int]
    graphs: list[str]
    validation_loss: float | None


def seen(model_chunks: list, optimizer: Any) -> tuple[list[int], list[str]]:
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    units = [unit for chunk in model_chunks for unit in chunk.units]
    params = [unit.main_param.storage.view(torch.int32).sum().item() for unit in units]
    return params, [stage for stage, graph in FullCudaGraphWrapper.cuda_graph.items() if graph]


def train(line: Sequence[str]) -> Run:
    with on_device(uses_te=True):
        record = run_pretrain(list(line), inspect=seen)
    return Run(record.losses_and_norms, *record.inspected, record.validation_loss)


def compare(
    worlds: DeviceWorlds,
    more: Sequence[str],
    sizes: Sequence[int],
    laws: Sequence[Delays] = (Delays(),),
    num_ranks: int = 2,
    env: dict[str, str] | None = None,
) -> None:
    line = [*COMMON, *more, *size_flags(sizes)]
    env = (env or {}) | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if num_ranks == 4 else {})
    for eager, *captured in worlds.run(
        with_and_without, num_ranks, train, line, WHOLE, laws, timeout_s=850, env=env
    ):
        assert not eager.graphs and len({loss for loss, _ in eager.steps}) in (1, len(eager.steps))
        for run in captured:
            assert run.graphs == ["training", *["validation"] * ("--eval-iters" in more)]
            assert run.steps == eager.steps
            assert run.params == eager.params
            assert run.validation_loss == eager.validation_loss


@pytest.mark.parametrize("law", [law for law in LAWS if law != "none"])
def test_the_bits_are_those_without_a_graph_under_ten_seeds_of_a_law(
    te_worlds: DeviceWorlds, law: str
):
    for first in range(0, 10, 5):
        laws = [Delays(law, seed) for seed in range(first, first + 5)]
        compare(te_worlds, ["--bf16"], (2, 2, 2), laws)


@pytest.mark.parametrize("form", FORMS)
def test_other_runs_keep_their_bits(te_worlds: DeviceWorlds, form: str):
    ranks, sizes, more = FORMS[form]
    compare(te_worlds, ["--bf16", *more], sizes, [Delays("uniform", 1)], ranks)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_layers_that_compute_in_fp8_and_fp4_keep_their_bits(te_worlds: DeviceWorlds, recipe: str):
    compare(te_worlds, [*RECIPES[recipe], *codes_of(recipe)], (2, 2, 2), env=env_of(recipe))


def test_a_run_with_evaluations_and_saves_goes_on_from_a_checkpoint_with_the_same_bits(
    te_worlds: DeviceWorlds, tmp_path: Path
):
    line = [*COMMON, "--bf16", "--train-iters", "30", *size_flags((2, 2, 2))]
    line += ["--eval-iters", "1", "--eval-interval", "5"]
    for eager, saved, resumed in te_worlds.run(
        whole_and_resumed, 2, train, line, WHOLE, str(tmp_path), 10, 20, timeout_s=850
    ):
        assert saved.graphs and resumed.graphs
        assert saved.steps == eager.steps and resumed.steps == eager.steps[20:]
        assert saved.params == resumed.params == eager.params
        assert saved.validation_loss == resumed.validation_loss == eager.validation_loss


def with_more_micro_batches(line: Sequence[str]) -> str:
    with on_device(uses_te=True), pytest.raises(Exception, match="micro-batches") as told:
        run_pretrain([*line, *WHOLE], prepare=_double_the_batch_after_three_steps)
    return str(told.value)


def _double_the_batch_after_three_steps(model: list) -> list:
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    def update(*_: Any, **__: Any) -> None:
        if FullCudaGraphWrapper.curr_iteration["training"] == 3:
            calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR.num_micro_batches = 4

    calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR.update = update
    return model


def test_another_number_of_micro_batches_is_refused(te_worlds: DeviceWorlds):
    line = [*COMMON, "--bf16", *size_flags((2, 2, 2))]
    for told in te_worlds.run(with_more_micro_batches, 2, line, timeout_s=590):
        assert told.startswith("--cuda-graph-impl full_iteration: 4 micro-batches of training")
