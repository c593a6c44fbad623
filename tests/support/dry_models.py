# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Small models of every kind whose memory is counted, and predicted by a dry run."""

from typing import NamedTuple

from megatron_asynchzp.testbed.megatron_flags import size_flags
from megatron_asynchzp.testbed.megatron_runs import BF16, FULL_RECOMPUTE, UNTIED, gpt_args

# So wide and long that activations are a good part of the peak.
# fmt: off
_SHAPE = ["--num-layers", "4", "--hidden-size", "128", "--seq-length", "128",
          "--max-position-embeddings", "128", "--micro-batch-size", "2", "--vocab-size", "511",
          "--train-iters", "3"]
_LLAMA = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
          "--position-embedding-type", "rope", *UNTIED]
_GROUPED = ["--group-query-attention", "--num-query-groups", "2"]
_LATENT = ["--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16",
           "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "16", "--v-head-dim", "16",
           "--rope-type", "rope", "--use-pasa-attention"]
_EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type",
            "alltoall", "--moe-router-load-balancing-type", "none", "--disable-bias-linear"]
_DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
_SELECTIVE = ["--recompute-granularity", "selective"]
_BLOCK = ["--recompute-granularity", "full", "--recompute-method", "block",
          "--recompute-num-layers", "2"]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2"]
PIPELINE_PARALLEL = ["--pipeline-model-parallel-size", "2"]
# fmt: on


class Case(NamedTuple):
    """A model on `ranks` ranks. flags: all of a training run on the CPU."""

    name: str
    ranks: int
    flags: list[str]


def _case(name: str, *flags: str, ranks: int = 2, dtype: list[str] = BF16) -> Case:
    return Case(name, ranks, gpt_args(*_SHAPE, *dtype, *flags, *size_flags((2, 2, 2))))


CASES = (
    _case("dense"),
    _case("dense, dropout", *_DROPOUT),
    _case("dense, full recompute", *FULL_RECOMPUTE),
    _case("Llama", *_LLAMA),
    _case("Llama, fp32", *_LLAMA, dtype=[]),
    _case("Llama, selective recompute", *_LLAMA, *_SELECTIVE),
    _case("Llama, full recompute", *_LLAMA, *FULL_RECOMPUTE),
    _case("Llama, two layers recomputed", *_LLAMA, *_BLOCK),
    _case("grouped queries", *_LLAMA, *_GROUPED),
    _case("grouped queries, PASA", *_LLAMA, *_GROUPED, "--use-pasa-attention"),
    _case("latent attention", *_LLAMA, *_LATENT),
    _case("latent attention, full recompute", *_LLAMA, *_LATENT, *FULL_RECOMPUTE),
    _case("experts", *_LLAMA, *_EXPERTS),
    _case("experts, full recompute", *_LLAMA, *_EXPERTS, *FULL_RECOMPUTE),
    _case("tensor parallel", *_LLAMA, *TENSOR_PARALLEL, ranks=4),
    _case("tensor parallel, full recompute", *TENSOR_PARALLEL, *FULL_RECOMPUTE, ranks=4),
    _case("pipeline parallel", *_LLAMA, *PIPELINE_PARALLEL, ranks=4),
    _case("pipeline parallel, full recompute", *PIPELINE_PARALLEL, *FULL_RECOMPUTE, ranks=4),
)
