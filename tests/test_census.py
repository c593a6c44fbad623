# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The census of recipes, on folders of a few."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.train.census import find_cases

ROOT = Path(__file__).parents[1]

_RECIPE = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 2
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 32
  --max-position-embeddings: 32
  --micro-batch-size: 1
  --global-batch-size: 8
  --train-iters: 10
  --lr: 1e-3
  --bf16: true
  --swiglu: false
  --data-path: ${DATA_PATH}/text
  --tokenizer-type: GPT2BPETokenizer
  --vocab-file: ${DATA_PATH}/vocab.json
"""
_SCRIPT = """
#!/bin/bash
LAYERS=2
MODEL_ARGS=(
    --num-layers ${LAYERS}   # a comment
    --hidden-size 64 --num-attention-heads ${HEADS:-4}
    --seq-length 32 --max-position-embeddings 32
)
torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL_ARGS[@]} --micro-batch-size 1 \\
    --global-batch-size 8 --train-iters 10 --lr=1e-3 --bf16 --save "$CHECKPOINTS"
"""


def _write_recipes(folder: Path, more: dict[str, str]) -> None:
    for name, lines in more.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "model_config.yaml").write_text(_RECIPE + lines)


def test_scripts_and_functional_tests_become_command_lines_without_files(tmp_path):
    _write_recipes(tmp_path, {"inference": "MODE: inference\n", "listed": "  --spec: '[a b]'\n"})
    (tmp_path / "train.sh").write_text(_SCRIPT)
    (tmp_path / "other.sh").write_text("echo --verbose\n")
    listed, script = find_cases([tmp_path])
    assert (listed.path.parent.name, script.path.name) == ("listed", "train.sh")
    line = " ".join(listed.flags)
    assert "--lr 1e-3 --bf16 --spec a b" in line
    assert "--mock-data --tokenizer-type NullTokenizer" in line
    assert not {"--swiglu", "--data-path", "--vocab-file"} & set(listed.flags)
    line = " ".join(script.flags)
    assert "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32" in line
    assert "--lr 1e-3 --bf16 --save 1" in line and "nproc" not in line


def test_recipes_of_a_list_get_a_model_that_their_sizes_divide(tmp_path):
    flags = ["--bf16", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]
    flags += ["--expert-model-parallel-size", "2", "--nccl-ub"]
    recipe = {"name": "one", "hardware": "h100", "gpus": 16, "flags": flags, "vpp": 3}
    (path := tmp_path / "recipes.json").write_text(json.dumps([recipe]))
    (case,) = find_cases([path])
    assert (case.name, case.hardware, case.ranks) == ("one", "h100", 16)
    line = " ".join(case.flags)
    assert "--num-layers 24" in line and "--num-virtual-stages-per-pipeline-rank 3" in line
    assert "--num-experts 16" in line and "--use-nccl-ub" in line and "--mock-data" in line
    recipe["flags"] = [*flags, "--cuda-graph-impl", "transformer_engine"]
    path.write_text(json.dumps([recipe]))
    (case,) = find_cases([path])
    assert "--cuda-graph-modules attn moe_router moe_preprocess" in " ".join(case.flags)
    # A number of layers alone offloads none in those configurations, and Megatron takes no graphs
    # beside offloading.
    offloaded = ["--cpu-offloading-num-layers", "5"]
    for more, offloads in ((offloaded, True), (["--cuda-graph-impl", "local", *offloaded], False)):
        path.write_text(json.dumps([recipe | {"flags": [*flags, *more]}]))
        (case,) = find_cases([path])
        assert ("--cpu-offloading-num-layers" in case.flags) == offloads


@pytest.mark.slow
def test_the_census_of_a_list_says_what_runs_as_it_is_weakened_and_refused(tmp_path):
    fp8 = ["--fp8-format", "hybrid", "--fp8-recipe"]
    mxfp8 = ["--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"]
    cases = {
        "plain": ["--bf16"],
        "lossy fp8 gathers": ["--bf16", *fp8, "delayed", "--fp8-param-gather"],
        "mxfp8 with FSDP": ["--bf16", *fp8, "mxfp8", *mxfp8, "--use-megatron-fsdp"],
        "frozen": ["--bf16", "--freeze-all-layers"],
    }
    recipes = [
        {"name": name, "hardware": "h100", "gpus": 8, "flags": flags, "vpp": None}
        for name, flags in cases.items()
    ]
    (path := tmp_path / "recipes.json").write_text(json.dumps(recipes))
    out = tmp_path / "census.jsonl"
    command = [sys.executable, "-m", "scripts.train.census", str(path), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    _, *lines = map(json.loads, out.read_text().splitlines())
    found = {one["case"]: (one["ours"] and one["ours"]["by"], one["lost"]) for one in lines}
    assert found == {
        "plain": (None, []),
        "lossy fp8 gathers": (None, ["fp8_param_gather"]),
        "mxfp8 with FSDP": (None, []),
        "frozen": ("--freeze-all-layers", []),
    }
