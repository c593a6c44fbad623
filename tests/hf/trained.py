# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What stock Megatron computes on gloo ranks: models it trained and saved, and models it loaded
from an import. One set of ranks for all of them.
"""

from pathlib import Path
from typing import Any

import torch

from megatron_asynchzp.hf.shape import command_line
from scripts.testbed.megatron_flags import UNTIED
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.hf.models import POSITIONS, VOCABULARY, shapes, tokens

_SIZES = ["--vocab-size", str(VOCABULARY), "--make-vocab-size-divisible-by", "16"]
# fmt: off
_LLAMA = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--ffn-hidden-size",
          "96", "--position-embedding-type", "rope"]
# fmt: on
_GROUPED = ["--group-query-attention", "--num-query-groups", "2"]
_EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2"]
_EXPERT_PARALLEL = ["--expert-model-parallel-size", "2"]
_TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2"]
# Experts train beside tensor parallelism only with it.
_EXPERTS_TENSOR_PARALLEL = [*_TENSOR_PARALLEL, "--sequence-parallel"]
# Large steps, so that norms and biases are far from what they start as.
_TRAIN = ["--train-iters", "3", "--lr", "3e-2", "--min-lr", "1e-2", "--lr-warmup-iters", "0"]

# fmt: off
TRAINED: dict[str, list[str]] = {
    "llama, grouped queries, untied, TP 2": [*_LLAMA, *_GROUPED, *UNTIED, *_TENSOR_PARALLEL],
    "llama, tied, scaled rope, PP 2": [
        *_LLAMA, "--use-rope-scaling", "--rotary-base", "500000",
        "--pipeline-model-parallel-size", "2",
    ],
    "gpt2, tied, TP 2": [*_TENSOR_PARALLEL],
    "gpt2, untied, distributed optimizer": [*UNTIED, "--use-distributed-optimizer"],
    "qwen2, grouped queries, untied": [*_LLAMA, *_GROUPED, *UNTIED, "--add-qkv-bias"],
    "qwen3, grouped queries, tied, TP 2": [
        *_LLAMA, *_GROUPED, *_TENSOR_PARALLEL, "--qk-layernorm", "--kv-channels", "32",
    ],
    "mixtral, grouped queries, untied, EP 2": [
        *_LLAMA, *_GROUPED, *UNTIED, *_EXPERTS, *_EXPERT_PARALLEL,
    ],
    "mixtral, tied, TP 2": [*_LLAMA, *_EXPERTS, *_EXPERTS_TENSOR_PARALLEL],
    "qwen3_moe, grouped queries, untied, TP 2": [
        *_LLAMA, *_GROUPED, *UNTIED, *_EXPERTS, *_EXPERTS_TENSOR_PARALLEL, "--qk-layernorm",
        "--kv-channels", "32", "--moe-ffn-hidden-size", "48",
    ],
    "qwen3_moe, tied, softmax of all, TP 2, EP 2": [
        *_LLAMA, *_EXPERTS, *_EXPERTS_TENSOR_PARALLEL, *_EXPERT_PARALLEL,
        "--expert-tensor-parallel-size", "1", "--qk-layernorm", "--moe-ffn-hidden-size", "48",
        "--moe-router-pre-softmax",
    ],
}
# fmt: on


def train_and_save(name: str, folder: Path) -> torch.Tensor | None:
    """Train a few steps and save below `folder`; the logits of the last stage, as in logits_of."""
    save = ["--save", str(folder), "--save-interval", "1000", "--ckpt-format", "torch_dist"]
    return run_pretrain(gpt_args(*_SIZES, *TRAINED[name], *_TRAIN, *save), _logits).inspected


def load_imported(name: str, folder: Path) -> torch.Tensor | None:
    """The logits of an imported model, loaded with the flags that the import prints."""
    shape = shapes()[name]
    flags = " ".join(command_line(shape)).split()
    if shape.family == "mixtral":
        flags += _EXPERT_PARALLEL
    elif shape.num_query_groups > 1:
        flags += _EXPERTS_TENSOR_PARALLEL if shape.experts else _TENSOR_PARALLEL
    load = ["--load", str(folder), "--finetune", "--ckpt-format", "torch_dist"]
    still = ["--train-iters", "1", "--lr", "0", "--min-lr", "0", "--lr-warmup-iters", "0"]
    return run_pretrain(gpt_args(*_SIZES, *flags, *load, *still), _logits).inspected


def _logits(model: list, optimizer: Any) -> torch.Tensor | None:
    """[2, POSITIONS, VOCABULARY] of the test's tokens, on the last pipeline stage."""
    from megatron.core import parallel_state

    group: Any = parallel_state.get_pipeline_model_parallel_group()
    stage, num_stages = group.rank(), group.size()
    chunk = model[0].eval()
    positions = torch.arange(POSITIONS).expand(2, POSITIONS)
    with torch.no_grad():
        if stage > 0:
            hidden = torch.empty(POSITIONS, 2, 64)
            torch.distributed.recv(hidden, group=group, group_src=stage - 1)
            chunk.module.set_input_tensor(hidden)
        output = chunk(tokens(), positions, None, runtime_gather_output=True)
        if stage < num_stages - 1:
            torch.distributed.send(output, group=group, group_dst=stage + 1)
    chunk.train()
    return output[..., :VOCABULARY].float().numpy() if stage == num_stages - 1 else None


def train_and_load(trained: dict[str, Path], imported: dict[str, Path]) -> dict[str, Any]:
    """Body of a rank: the logits of all models, by name, None on stages without."""
    return {
        **{name: train_and_save(name, folder) for name, folder in trained.items()},
        **{name: load_imported(name, folder) for name, folder in imported.items()},
    }
