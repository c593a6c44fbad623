# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a long run has in its hands: Megatron's pretrain() on 2 ranks, thousands of steps with
evaluations and saves, ended and started again from its checkpoint. Every 500 steps: bytes of live
tensors, resident memory, open files and threads of a rank.

    python -m scripts.bench.long_run --out runs/long_run.jsonl
    python -m scripts.report.add_record long_run runs/long_run.jsonl
"""

import argparse
import contextlib
import io
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scripts.report.long_run_table import long_run_table
from scripts.report.records import append
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import gpt_args, listening, patched, pretrain
from scripts.testbed.memory import install_memory_count
from scripts.testbed.ranks import run_ranks

RANKS, SIZES = 2, (1, 2, 2)
SAMPLE_EVERY = 500


class Samples:
    """What this rank has, every SAMPLE_EVERY steps."""

    def __init__(self, start: int):
        self._start, self._count = start, install_memory_count()
        self.lines: list[dict] = []

    def take(self, logged: dict[str, Any]) -> None:
        """Called with the arguments of Megatron's training_log, at the end of a step."""
        if logged["iteration"] % SAMPLE_EVERY:
            return
        statm = Path("/proc/self/statm").read_text().split()
        self.lines.append(
            {
                "start": self._start,
                "rank": dist.get_rank(),
                "step": logged["iteration"],
                "live_nbytes": self._count.live_nbytes if self._count else None,
                "resident_nbytes": int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
                "files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "python_threads": threading.active_count(),
                "loss": float(next(iter(logged["loss_dict"].values()))),
            }
        )
        if dist.get_rank() == 0:
            print(f"start {self._start}, step {logged['iteration']}", flush=True)


def train(start: int, stop_at: int, steps: int, folder: str) -> list[dict]:
    """One start: from the checkpoint that the one before has left to step `stop_at`."""
    line = gpt_args(
        *("--train-iters", str(steps), "--exit-interval", str(stop_at), "--use-asynchzp"),
        *("--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
        *("--max-position-embeddings", "8", "--global-batch-size", "2", "--bf16"),
        *("--eval-interval", "500", "--eval-iters", "2", "--log-interval", "1000"),
        *("--save", folder, "--load", folder, "--save-interval", "1000"),
        *size_flags(SIZES),
    )
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    samples = Samples(start)
    with (
        contextlib.redirect_stdout(io.StringIO()) if dist.get_rank() else contextlib.nullcontext(),
        patched(line),
        listening(lambda: None, samples.take),
        contextlib.suppress(SystemExit),  # how Megatron leaves at --exit-interval
    ):
        pretrain(line)
    return samples.lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args()
    each, rest = divmod(args.steps, max(1, args.starts))
    if args.starts < 1 or rest or each % SAMPLE_EVERY:
        parser.error(f"--steps divided by --starts must be a multiple of {SAMPLE_EVERY}")
    lines: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        for start in range(args.starts):
            words = start, (start + 1) * each, args.steps, folder
            found = run_ranks(train, RANKS, *words, timeout_s=7200.0, env={"OMP_NUM_THREADS": "1"})
            lines += [line for rank in found for line in rank]
            folders = [path for path in Path(folder).iterdir() if path.is_dir()]
            entries = sum(1 for path in Path(folder).rglob("*") if path.is_file())
            lines.append({"start": start, "checkpoints": len(folders), "entries": entries})
    print(long_run_table(lines))
    if args.out:
        append(args.out, machine_record(), *lines)


if __name__ == "__main__":
    main()
