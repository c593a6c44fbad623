# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Starts Megatron on some ranks of this machine, stock or ours, and reads its records."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from scripts.gpu_check.measured_pretrain import COUNTED_STEPS
from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.gpu_check.process import ROOT, Ended, run_command
from scripts.testbed.differences import worst_difference
from scripts.testbed.megatron_flags import flags_of, shape_flags

# fmt: off
# Without Transformer Engine and apex, Megatron's own layers.
LOCAL = [
    "--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion",
    "--no-gradient-accumulation-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion",
    "--no-bias-dropout-fusion",
]
# fmt: on
_SKIPPED_STEPS = 2  # the first ones allocate and compile


@dataclass(frozen=True)
class GptShape:
    """layers, width, heads, sequence: of the model; batch: sequences of a micro-batch."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    sequence: int = 32
    batch: int = 1
    vocab: int = 127


def gpt_shape(target: Target) -> GptShape:
    """Large enough for a device to be busy, small enough to start in seconds."""
    return GptShape(8, 1024, 16, 1024, 4, 8191) if target.is_large else GptShape()


def training_flags(target: Target, steps: int, global_batch: int, *more: str) -> list[str]:
    """Megatron's flags of a GPT on mock data; of a flag that appears twice the last one counts."""
    shape = gpt_shape(target)
    values = {
        "micro-batch-size": shape.batch,
        "global-batch-size": global_batch * shape.batch,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": shape.vocab,
        "make-vocab-size-divisible-by": 64,
        "train-iters": steps,
        "lr": "1e-3",
        "lr-decay-iters": 100,
        "lr-warmup-iters": 2,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "clip-grad": 1.0,
        "eval-iters": 0,
        "eval-interval": 1000,
        "log-interval": 1,
        "num-workers": 0,
        "distributed-timeout-minutes": 2,
        "distributed-backend": "nccl" if target.is_cuda else "gloo",
    }
    has_te = target.is_cuda and find_spec("transformer_engine") is not None
    has_apex = find_spec("fused_weight_gradient_mlp_cuda") is not None
    of_te = [] if has_apex else ["--no-gradient-accumulation-fusion"]
    size = shape_flags(shape.layers, shape.width, shape.sequence, shape.heads)
    return [*size, *flags_of(values), "--mock-data", *(of_te if has_te else LOCAL), *more]


@dataclass(frozen=True)
class Run:
    """The numbers of a run.

    `losses`, `grad_norms`: by step, of the first rank that has them; `step_s`: median seconds of a
    step; `waits`: implicit waits of the host per step, on rank 0, by line of code.
    """

    losses: list[float]
    grad_norms: list[float]
    step_s: float
    waits: dict[str, float]


def run_pretrain(
    target: Target,
    name: str,
    ranks: int,
    flags: Sequence[str],
    limit_s: float,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Train on `ranks` ranks of this machine; the log is NAME.log.

    `limit_s`: on a large device. Raises CheckFailed for a run that does not end, or not with status
    0.
    """
    limit_s, records = target.longest_s(limit_s), target.folder / name
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir()
    # fmt: off
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(ranks), "-m", "scripts.gpu_check.measured_pretrain", *flags]
    # fmt: on
    shipped = shipped_environment(flags) if target.is_cuda else {"GLOO_SOCKET_IFNAME": "lo"}
    given = {"GPU_CHECK_RECORDS": str(records), **shipped, **(env or {})}
    ended = run_command(command, target.folder / f"{name}.log", limit_s, given)
    if ended.status != 0:
        raise CheckFailed(f"{name}: {_first_words(ended, limit_s)}")
    return _read(records, ranks)


def shipped_environment(flags: Sequence[str]) -> dict[str, str]:
    """What scripts/train/env_cuda.sh sets for a run with these flags."""
    script = 'source scripts/train/env_cuda.sh "$@"; env -0'
    command = ["env", "-i", "bash", "-euc", script, "env_cuda.sh", *flags]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = dict(line.split("=", 1) for line in printed.split("\0") if line)
    shipped = {name: value for name, value in found.items() if name.startswith(("CUDA", "NCCL"))}
    return {name: os.environ.get(name, value) for name, value in shipped.items()}


def _first_words(ended: Ended, limit_s: float) -> str:
    """Our own line, if there is one: it names the reason, torchrun's last line does not."""
    own = [line for line in ended.lines if line.startswith("megatron_asynchzp: ")]
    status = ended.describe(limit_s)
    return f"{own[-1]} ({status.partition(';')[0]})" if own else status


def _read(records: Path, ranks: int) -> Run:
    all_ranks = [json.loads((records / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    with_loss = next(
        one["steps"] for one in all_ranks if one["steps"] and one["steps"][0]["loss"] is not None
    )
    timed = [step["seconds"] for step in with_loss[_SKIPPED_STEPS : -COUNTED_STEPS - 1]]
    timed = [seconds for seconds in timed if seconds is not None]
    waits = {line: count / COUNTED_STEPS for line, count in all_ranks[0]["waits"].items()}
    return Run(
        losses=[step["loss"] for step in with_loss],
        grad_norms=[step["grad_norm"] for step in with_loss],
        step_s=statistics.median(timed) if timed else float("nan"),
        waits=waits,
    )


def require_equal(what: str, ours: Sequence[float], stock: Sequence[float], limit: float) -> float:
    """Return the largest relative difference.

    Raises CheckFailed if it is above `limit` or NaN, or if one series is empty or shorter.
    """
    if not ours or len(ours) != len(stock):
        raise CheckFailed(f"{what}: {len(ours)} numbers against {len(stock)}")
    error = worst_difference(ours, stock)
    if not error <= limit:
        raise CheckFailed(f"{what}: {error:.1e} apart, more than {limit:g}")
    return error
