# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The memory that a dry run predicts for small models, beside the count of every tensor of three
steps of Megatron's pretrain() with the same flags on the CPU."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from scripts.testbed import megatron_runs
from scripts.testbed.megatron_flags import (
    BF16,
    FULL_RECOMPUTE,
    MIXTURE_OF_EXPERTS,
    PIPELINE_PARALLEL,
    TENSOR_PARALLEL,
    UNTIED,
    shape_flags,
    size_flags,
)
from scripts.testbed.megatron_runs import gpt_args
from scripts.testbed.memory import install_memory_count
from scripts.testbed.ranks import run_ranks

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 1800

# So wide and long that activations are a good part of the peak.
# fmt: off
_SHAPE = [*shape_flags(4, 128, 128), "--micro-batch-size", "2", "--vocab-size", "511",
          "--train-iters", "3"]
_LLAMA = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
          "--position-embedding-type", "rope", *UNTIED]
_GROUPED = ["--group-query-attention", "--num-query-groups", "2"]
_LATENT = ["--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16",
           "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "16", "--v-head-dim", "16",
           "--rope-type", "rope", "--use-pasa-attention"]
_DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
_SELECTIVE = ["--recompute-granularity", "selective"]
_MOE_AGAIN = [*_SELECTIVE, "--recompute-modules", "moe"]
_BLOCK = ["--recompute-granularity", "full", "--recompute-method", "block",
          "--recompute-num-layers", "2"]
_ROUNDED = ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16",
            "--exp-avg-sq-dtype", "bf16"]
_ADAPTERS = ["--asynchzp-adapter-rank", "16"]
_ON_TWO = ["--asynchzp-adapter-layers", "linear_qkv", "linear_fc2"]
# Beside the computation, when gloo makes its copies is chance.
_IN_TURN = ["--asynchzp-schedule", "inline"]
# fmt: on


class Case(NamedTuple):
    """A model on `ranks` ranks. flags: all of a training run on the CPU; with
    --asynchzp-adapter-rank the run adds these adapters."""

    name: str
    ranks: int
    flags: list[str]


def _case(name: str, *flags: str, ranks: int = 2, dtype: Sequence[str] = BF16) -> Case:
    sizes = [*size_flags((2, 2, 2)), *_IN_TURN]
    return Case(name, ranks, gpt_args(*_SHAPE, *dtype, *flags, *sizes))


CASES = (
    _case("dense"),
    _case("dense, dropout", *_DROPOUT),
    _case("dense, full recompute", *FULL_RECOMPUTE),
    _case("Llama", *_LLAMA),
    _case("Llama, fp32", *_LLAMA, dtype=()),
    _case("Llama, moments in bf16", *_LLAMA, *_ROUNDED),
    _case("Llama, selective recompute", *_LLAMA, *_SELECTIVE),
    _case("Llama, full recompute", *_LLAMA, *FULL_RECOMPUTE),
    _case("Llama, two layers recomputed", *_LLAMA, *_BLOCK),
    _case("grouped queries", *_LLAMA, *_GROUPED),
    _case("grouped queries, PASA", *_LLAMA, *_GROUPED, "--use-pasa-attention"),
    _case("latent attention", *_LLAMA, *_LATENT),
    _case("latent attention, full recompute", *_LLAMA, *_LATENT, *FULL_RECOMPUTE),
    _case("experts", *_LLAMA, *MIXTURE_OF_EXPERTS),
    _case("experts, full recompute", *_LLAMA, *MIXTURE_OF_EXPERTS, *FULL_RECOMPUTE),
    _case("experts, recomputed", *_LLAMA, *MIXTURE_OF_EXPERTS, *_MOE_AGAIN),
    _case("tensor parallel", *_LLAMA, *TENSOR_PARALLEL, ranks=4),
    _case("tensor parallel, full recompute", *TENSOR_PARALLEL, *FULL_RECOMPUTE, ranks=4),
    _case("adapters", *_LLAMA, *_GROUPED, *_ADAPTERS),
    _case("adapters, full recompute", *_LLAMA, *_ADAPTERS, *FULL_RECOMPUTE),
    _case("adapters on two projections", *_LLAMA, *_ADAPTERS, *_ON_TWO),
    _case("adapters, tensor parallel", *_LLAMA, *TENSOR_PARALLEL, *_ADAPTERS, ranks=4),
    _case("adapters, pipeline parallel", *_LLAMA, *PIPELINE_PARALLEL, *_ADAPTERS, ranks=4),
    _case("pipeline parallel", *_LLAMA, *PIPELINE_PARALLEL, ranks=4),
    _case("pipeline parallel, full recompute", *PIPELINE_PARALLEL, *FULL_RECOMPUTE, ranks=4),
)
# Llama 3 70B with 8 of its 80 layers: widths are 1/64 and tokens 1/32 of its own. Adapters of rank
# 16 are a far larger part of it than of the real one, those of rank 2 nearly as small.
# fmt: off
_SMALL_70B = [*_LLAMA, *_GROUPED, *shape_flags(8, 128, 128, heads=8), "--ffn-hidden-size", "448",
              "--num-query-groups", "1", "--vocab-size", "2047", "--micro-batch-size", "1"]
# fmt: on
ADAPTED = tuple(
    _case(f"70B in small, rank {rank}{what}", *_SMALL_70B, *more, _ADAPTERS[0], str(rank))
    for rank in (2, 16)
    for what, more in (("", ()), (", full recompute", FULL_RECOMPUTE))
)


# ---- what a dry run predicts

# A process of its own: what a test-bed has replaced in torch must not make a model on the meta
# device real.
_CHILD = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
from megatron_asynchzp.commands.stages import dry_run_of_flags
for line in sys.stdin:
    flags, ranks = json.loads(line)
    stages = dry_run_of_flags(tuple([*flags, "--asynchzp-device", "cpu"]), ranks, ranks).stages
    print(json.dumps([[s.memory.start, s.memory.training] for s in stages]), file=out)
"""


class Peak(NamedTuple):
    """Bytes of live tensors at most: until the model and the optimizer are built, and after."""

    start: float
    training: float


def predicted_peaks(cases: Sequence[Case]) -> list[list[Peak]]:
    """Of each pipeline stage of each case. Raises RuntimeError where a dry run fails."""
    lines = "".join(json.dumps([case.flags, case.ranks]) + "\n" for case in cases)
    command = [sys.executable, "-W", "ignore", "-c", _CHILD]
    ended = subprocess.run(command, cwd=_ROOT, input=lines, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:])
    return [[Peak(*one) for one in json.loads(line)] for line in ended.stdout.splitlines()]


# ---- what is counted


def _with_described_adapters(chunks: list[Any]) -> list[Any]:
    from megatron.training import get_args

    from scripts.testbed.adapters import add_adapters

    args: Any = get_args()
    if getattr(args, "asynchzp_adapter_rank", None) is None:
        return chunks
    return add_adapters(chunks, args.asynchzp_adapter_rank, tuple(args.asynchzp_adapter_layers))


def _counted_peak(flags: list[str]) -> Peak:
    """Of this rank. Collective: it runs pretrain() with `flags`."""
    from megatron.training import training

    count = install_memory_count()
    if count is None:
        raise RuntimeError("the peaks cannot be counted here")
    set_up, before, start = training.setup_model_and_optimizer, 0, 0

    def set_up_measured(*args: Any, **kwargs: Any) -> Any:
        nonlocal before, start
        before = count.live_nbytes
        count.reset_peak()
        built = set_up(*args, **kwargs)
        start = count.peak_nbytes
        count.reset_peak()
        return built

    with mock.patch.object(training, "setup_model_and_optimizer", set_up_measured):
        # Megatron draws the weights itself, as in a run of a user.
        megatron_runs.run_pretrain(flags, prepare=_with_described_adapters)
    peak = Peak(start - before, count.peak_nbytes - before)
    count.uninstall()
    return peak


def counted_peaks(cases: Sequence[Case]) -> list[Peak]:
    """Of this rank, one run after another. Collective."""
    return [_counted_peak(case.flags) for case in cases]


def compare(cases: Sequence[Case]) -> Iterator[dict]:
    """One line per case and pipeline stage: bytes predicted, and counted on the rank of the stage
    that has most."""
    predicted = dict(zip((case.name for case in cases), predicted_peaks(cases), strict=True))
    for ranks in sorted({case.ranks for case in cases}):
        chosen = [case for case in cases if case.ranks == ranks]
        by_rank = run_ranks(counted_peaks, ranks, chosen, timeout_s=_LIMIT_S)
        for case, *peaks in zip(chosen, *by_rank, strict=True):
            stages = predicted[case.name]
            size = ranks // len(stages)
            for index, stage in enumerate(stages):
                of_stage = peaks[index * size : (index + 1) * size]
                yield {
                    "kind": "peak",
                    "model": case.name,
                    "ranks": ranks,
                    "stage": index,
                    "predicted": stage._asdict(),
                    "counted": {
                        name: max(getattr(peak, name) for peak in of_stage) for name in Peak._fields
                    },
                }
