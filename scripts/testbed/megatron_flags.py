# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the flags of small GPTs and groups of Megatron's flags that tests and benchmarks share."""

from collections.abc import Mapping, Sequence
from typing import Any

# fmt: off
DISTRIBUTED_OPTIMIZER = [
    "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
]
MEGATRON_FSDP = [
    *DISTRIBUTED_OPTIMIZER, "--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor",
    "--data-parallel-sharding-strategy", "optim_grads_params",
]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2"]
PIPELINE_PARALLEL = ["--pipeline-model-parallel-size", "2"]
# Without --overlap-grad-reduce stock HSDP gave wrong gradients behind the CPU platform (gradient
# norm 0.675 instead of 0.943), so the oracle always has it.
MEGATRON_HSDP = [*MEGATRON_FSDP, "--num-distributed-optimizer-instances", "2"]
MIXTURE_OF_EXPERTS = ["--num-experts", "4", "--moe-token-dispatcher-type", "alltoall",
                      "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none",
                      "--disable-bias-linear"]
UNTIED = ["--untie-embeddings-and-output-weights"]
FULL_RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform",
                  "--recompute-num-layers", "1"]
FP16 = ["--fp16", "--initial-loss-scale", "65536"]
BF16 = ["--bf16"]
# fmt: on


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """`--name value` for each."""
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def shape_flags(layers: int, hidden: int, seq_length: int, heads: int = 4) -> list[str]:
    """The shape of a GPT."""
    return flags_of(
        {
            "num-layers": layers,
            "hidden-size": hidden,
            "num-attention-heads": heads,
            "seq-length": seq_length,
            "max-position-embeddings": seq_length,
        }
    )


def small_gpt(
    layers: int, hidden: int, seq_length: int, *, words: int = 128, **values: Any
) -> list[str]:
    """A GPT without dropout on tokens that are made up, in a run that neither evaluates nor logs.

    words: the vocabulary, padded; values: of further flags, with "_" for "-".
    """
    # fmt: off
    common = {
        "tokenizer-type": "NullTokenizer", "vocab-size": words - 1,
        "make-vocab-size-divisible-by": 64, "attention-dropout": 0, "hidden-dropout": 0,
        "init-method-std": 0.05, "eval-iters": 0, "eval-interval": 1000, "log-interval": 1000,
        "logging-level": 40, "distributed-timeout-minutes": 1,
    }
    # fmt: on
    more = {name.replace("_", "-"): value for name, value in values.items()}
    switches = ["--mock-data", "--no-create-attention-mask-in-dataloader", "--no-one-logger"]
    return [*shape_flags(layers, hidden, seq_length), *flags_of(common | more), *switches]


def size_flags(sizes: Sequence[int]) -> list[str]:
    """AsyncHZP with these numbers of ranks that share parameters, gradients, optimizer states."""
    names = [f"asynchzp-{state}-shard-size" for state in ("param", "grad", "optim")]
    return ["--use-asynchzp", *flags_of(dict(zip(names, sizes, strict=True)))]
