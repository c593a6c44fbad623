# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron builds a model that no rank ever holds whole, and its weights are those of stock
Megatron in every bit."""

import contextlib
import shutil
from unittest import mock

import pytest

from scripts.testbed.megatron_flags import BF16, FP16, MIXTURE_OF_EXPERTS, UNTIED, size_flags
from scripts.testbed.megatron_runs import gpt_args
from scripts.testbed.memory import install_memory_count
from tests.support.model_starts import StartMemory, differing, own_weights, start, whole_models
from tests.support.world import on_ranks

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler"
)

# So deep that the whole model is far more than what a rank may hold.
DEEP = ("--hidden-size", "128", "--num-layers", "16", "--vocab-size", "511")
DEEP += ("--global-batch-size", "4")  # no more than a pipeline needs: the step does not matter
# fmt: off
LATENT = ["--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16",
          "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "16", "--v-head-dim", "16",
          "--position-embedding-type", "rope", "--rope-type", "rope", "--use-pasa-attention"]
HYBRID = ["--hybrid-layer-pattern", "*-" * 8, "--spec",
          "megatron_asynchzp.cpu_platform.local_hybrid", "local_hybrid_stack_spec"]
# fmt: on
EXPERT_PARALLEL = [*MIXTURE_OF_EXPERTS, "--expert-model-parallel-size", "2"]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2"]
PIPELINE_PARALLEL = ["--pipeline-model-parallel-size", "2"]
INTERLEAVED = [*PIPELINE_PARALLEL, "--num-virtual-stages-per-pipeline-rank", "2"]
META_DEVICE = ["--init-model-with-meta-device"]

OURS = META_DEVICE

CASES: dict[str, list[str]] = {
    "gpt, fp32": [],
    "gpt, untied": [*BF16, *UNTIED],
    "gpt, fp16": [*FP16],
    "gpt, meta device": [*BF16, *META_DEVICE],
    "experts": [*BF16, *MIXTURE_OF_EXPERTS],
    "expert parallel": [*BF16, *UNTIED, *EXPERT_PARALLEL],
    "latent attention": [*BF16, *LATENT],
    "hybrid": [*BF16, *HYBRID],
    "model provider": [*BF16, *UNTIED],
    "tensor parallel": [*BF16, *TENSOR_PARALLEL],
    "pipeline parallel, tied": [*BF16, *PIPELINE_PARALLEL],
    "interleaved pipeline, untied": [*BF16, *UNTIED, *INTERLEAVED],
    "random ranks": [*BF16, "--data-parallel-random-init"],
}
FAST = ["experts"]


@contextlib.contextmanager
def entry(name: str):
    """With the script that the case has: builders of other models, and of the older kind."""
    from megatron.training import argument_utils, training

    from tests.support import legacy_pretrain

    pretrain = training.pretrain

    def pretrain_with_provider(cfg_container, **arguments):
        cfg_container.model = None
        arguments["model_provider"] = legacy_pretrain.provide_model
        return pretrain(cfg_container=cfg_container, **arguments)

    if name == "hybrid":
        hybrid = argument_utils.hybrid_config_from_args
        with mock.patch.object(argument_utils, "gpt_config_from_args", hybrid):
            yield
    elif name == "model provider":
        with mock.patch.object(training, "pretrain", pretrain_with_provider):
            yield
    else:
        yield


def argv_of(name: str) -> list[str]:
    argv = gpt_args(*DEEP, *CASES[name])
    while name == "hybrid" and "--num-layers" in argv:  # its pattern gives their number
        at = argv.index("--num-layers")
        del argv[at : at + 2]
    return argv


def starts_of(names: list[str], world_size: int) -> dict[str, tuple]:
    """By case: the memory of a start, parameters that differ from stock Megatron's, the log's lines
    about units that stayed whole, and the memory of a start without sharding in between."""
    count, found = install_memory_count(), {}
    for name in names:
        argv = argv_of(name)
        is_split = any(flag in argv for flag in (TENSOR_PARALLEL[0], PIPELINE_PARALLEL[0]))
        sizes = size_flags((world_size // 2 if is_split else world_size,) * 3)
        with own_weights(), entry(name):
            ours = start([*argv, *sizes], count)
            stock_argv = [word for word in argv if word not in OURS]
            stock = start(stock_argv)
            with whole_models():
                whole = start([*argv, *sizes], count)
        lines = [line for line in ours.log.splitlines() if "stayed whole" in line]
        different = differing(ours.weights, stock.weights)
        found[name] = (ours.memory, different, lines, whole.memory)
    count.uninstall()
    return found


def check(name: str, memory: StartMemory, different: list, lines: list, whole: StartMemory) -> None:
    output = f"{name}: {memory}; whole: built {whole.built}, peak {whole.peak}"
    print(output)
    assert different == [], name
    assert memory.built <= memory.built_limit < whole.built, output
    assert memory.peak <= memory.limit, output
    if name == "pipeline parallel, tied":
        assert all("setup_embeddings_and_output_layer" in line for line in lines), lines
    else:
        assert lines == [], name


def test_no_rank_holds_more_than_its_shards_and_a_unit_of_a_model_that_is_built():
    for starts in on_ranks(starts_of, 2, FAST, 2):
        for name, found in starts.items():
            check(name, *found)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_rank_of_four_holds_more_than_its_shards_and_a_unit_of_any_model(name):
    for starts in on_ranks(starts_of, 4, [name], 4, timeout_s=300):
        check(name, *starts[name])
        if name == "gpt, fp32":  # four ranks' states in 16 bits are more than the model
            memory, *_, whole = starts[name]
            assert memory.peak <= memory.limit < whole.peak


def read_while_built() -> tuple[list, list[str], list[str]]:
    """A run whose weights are set one after another when the model is complete, in a hook: what
    differs from stock Megatron, and the log's lines about units and bytes that were whole."""
    argv = gpt_args(*BF16)
    ours = start([*argv, *size_flags((2, 2, 2))])
    lines = [line for line in ours.log.splitlines() if "stayed whole" in line]
    rows = [line for line in ours.log.splitlines() if "whole at most" in line]
    return differing(ours.weights, start(argv).weights), lines, rows


def test_a_hook_that_sets_weights_gets_whole_ones_and_a_line_names_it_and_the_cost():
    (different, (line,), rows), others = on_ranks(read_while_built, 2)
    assert different == [] and others == ([], [], [])
    assert len(rows) == 1 and "while the model was built" in rows[0]
    assert "4 units (module.embedding.word_embeddings.weight ... module.decoder.layers.1)" in line
    assert "seed_parameters" in line and "MiB on each rank" in line
