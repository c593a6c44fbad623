# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns random command lines of pretrain_gpt.py: models, parallel sizes, shard sizes, budgets, caps,
slots and dtypes."""

import random
from typing import Any

from scripts.testbed.megatron_flags import flags_of
from tests.support.engine import nested_sizes

_SEQ_LENGTH = 1024


def random_flags(seed: int) -> tuple[list[str], int]:
    """Flags with --use-asynchzp that Megatron and the plugin accept, and the ranks to start."""
    chance = random.Random(seed)
    pick = chance.choice
    tp, cp, pp = pick((1, 1, 2, 4)), pick((1, 1, 2)), pick((1, 1, 2, 4))
    virtual = pick((1, 2)) if pp > 1 else 1
    replicas = pick((2, 4, 8))
    ranks = tp * cp * pp * replicas
    heads, num_layers = pick((4, 8, 16)), pp * virtual * pick((1, 2, 3))
    values: dict[str, Any] = {
        "num-layers": num_layers,
        "hidden-size": 64 * heads * pick((1, 2)),
        "num-attention-heads": heads,
        "seq-length": _SEQ_LENGTH,
        "max-position-embeddings": _SEQ_LENGTH,
        "vocab-size": pick((999, 8000, 32000)),
        "make-vocab-size-divisible-by": pick((1, 128)),
        "tokenizer-type": "NullTokenizer",
        "micro-batch-size": pick((1, 2)),
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "context-parallel-size": cp,
    }
    values["global-batch-size"] = replicas * values["micro-batch-size"] * pp * pick((1, 2, 5))
    words = ["--use-asynchzp", "--mock-data"]
    if virtual > 1:
        values["num-virtual-stages-per-pipeline-rank"] = virtual
    words += _layers(chance, values, tp)
    words += _dtypes(chance)
    words += _recomputation(chance, num_layers // (pp * virtual))
    sizes = pick(nested_sizes(replicas * cp))
    values |= dict(
        zip([f"asynchzp-{state}-shard-size" for state in ("param", "grad", "optim")], sizes)
    )
    values |= _budgets(chance)
    return [*words, *flags_of(values)], ranks


def _layers(chance: random.Random, values: dict[str, Any], tp: int) -> list[str]:
    """Of attention, of MLPs or experts, and of the ends."""
    if chance.random() < 0.2:
        values["mtp-num-layers"] = chance.choice((1, 2))
    if chance.random() < 0.3:
        values["ffn-hidden-size"] = 4 * chance.choice((50, 77))  # no multiple of the alignment
    flags = [
        "--untie-embeddings-and-output-weights",
        "--swiglu",
        "--qk-layernorm",
        "--add-qkv-bias",
    ]
    words = [flag for flag in flags if chance.random() < 0.5]
    has_experts = chance.random() < 0.4
    if has_experts or chance.random() < 0.5:
        words.append("--disable-bias-linear")
    if tp > 1 and (has_experts or chance.random() < 0.5):
        words.append("--sequence-parallel")
    if chance.random() < 0.5:
        values["normalization"] = "RMSNorm"
    if "mtp-num-layers" in values or chance.random() < 0.5:
        values["position-embedding-type"] = "rope"
    if chance.random() < 0.5:
        words.append("--group-query-attention")
        values["num-query-groups"] = chance.choice((2, 4)) if tp < 4 else 4
    if not has_experts:
        return words
    values["num-experts"] = chance.choice((4, 8))
    values["moe-router-topk"] = chance.choice((2, 3))
    values["moe-ffn-hidden-size"] = chance.choice((256, 384))
    values["expert-model-parallel-size"] = chance.choice((1, 2))
    if tp == 1 or chance.random() < 0.5:
        values["expert-tensor-parallel-size"] = 1
    if chance.random() < 0.5:
        values["moe-shared-expert-intermediate-size"] = 512
    return words


def _dtypes(chance: random.Random) -> list[str]:
    words = list(chance.choice((["--bf16"], ["--bf16"], ["--fp16"], [])))
    if chance.random() < 0.5:
        words.append("--grad-reduce-in-bf16")
    if chance.random() < 0.2:
        return [*words, "--optimizer", "muon" if "--bf16" in words else "sgd"]
    if chance.random() < 0.6:
        words = [*words, "--use-precision-aware-optimizer"]
        words += ["--exp-avg-dtype", chance.choice(("fp32", "bf16"))]
        words += ["--exp-avg-sq-dtype", chance.choice(("fp32", "bf16"))]
        if "--bf16" in words:
            words += ["--main-grads-dtype", chance.choice(("fp32", "bf16"))]
    return words


def _recomputation(chance: random.Random, layers: int) -> list[str]:
    match chance.choice(("none", "selective", "uniform", "block")):
        case "none":
            return []
        case "selective":
            return ["--recompute-granularity", "selective"]
        case method:
            how = {"recompute-method": method, "recompute-num-layers": chance.randint(1, layers)}
            return ["--recompute-granularity", "full", *flags_of(how)]


def _budgets(chance: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"asynchzp-prefetch-depth": chance.randint(0, 3)}
    found["asynchzp-schedule"] = chance.choice(("auto", "inline", "main-thread"))
    for what in ("params", "grads"):
        if chance.random() < 0.5:
            found[f"asynchzp-keep-{what}-gb"] = chance.choice((0.125, 1.5, 6))
    if chance.random() < 0.5:
        found["asynchzp-memory-in-flight-gb"] = chance.choice((0.06, 0.15, 0.4))
    if chance.random() < 0.7:
        found["asynchzp-grad-slot-mb"] = chance.choice((0.5, 3, 16, 64))
    return found
