# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one rank of scripts/train/pretrain_gpt.py and records the unrounded numbers of each step.

The arguments are Megatron's flags; the records go to the folder of $GPU_CHECK_RECORDS.

$GPU_CHECK_CONNECTIONS: hardware queues of this process, whatever Megatron asks for.
$GPU_CHECK_DELAY_S: the longest time by which a launch of ours is late, drawn anew for each.
$GPU_CHECK_PRELOAD: a module that is imported before Megatron is.
"""

import importlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_asynchzp import launch
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.mcore.start.startup import prepare_process
from scripts.gpu_check.process import ROOT
from scripts.gpu_check.synchronisations import counted_synchronisations
from scripts.testbed.megatron_runs import listening

SCRIPT = ROOT / "scripts" / "train" / "pretrain_gpt.py"
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# So many steps count implicit waits, which makes them slower: their time is not used. The last one
# comes after them, because a save at the end of a run waits.
COUNTED_STEPS = 2


def open_device(connections: str) -> None:
    """Start CUDA with this number of hardware queues, and let Megatron find the 1 that it demands.

    Megatron demands it for tensor parallelism; the driver reads the variable once, at its start.
    """
    import torch

    os.environ[_QUEUES] = connections
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.zeros(1, device="cuda")
    os.environ[_QUEUES] = "1"


@contextmanager
def late_launches(longest_s: float) -> Iterator[None]:
    """Every submission to the engine waits for a random time first, another one on each rank."""
    submit, rank = Driver.submit, int(os.environ.get("RANK", "0"))
    drawn = random.Random(rank)

    def late_submit(self: Driver, task: Task) -> Task:
        time.sleep(drawn.uniform(0.0, longest_s))
        return submit(self, task)

    with mock.patch.object(Driver, "submit", late_submit):
        yield


class Recorder:
    """Records the steps of a run.

    `steps`: loss (None on a stage without one), gradient norm, and seconds since the step before
    began; `waits`: implicit ones, by line of code, of the counted steps.
    """

    def __init__(self):
        self.steps: list[dict[str, float | None]] = []
        self.waits: Counter[str] = Counter()
        self._begin_s: float | None = None
        self._counting = ExitStack()

    def begin_step(self) -> None:
        from megatron.training import get_args

        now_s = time.perf_counter()
        if self.steps and self._begin_s is not None:
            self.steps[-1]["seconds"] = now_s - self._begin_s
        self._begin_s = now_s
        args: Any = get_args()
        left = args.train_iters - args.iteration - len(self.steps)
        if left == COUNTED_STEPS + 1 and self._is_cuda():
            self._counting.enter_context(counted_synchronisations(self.waits))
        elif left == 1:
            self._counting.close()

    def end_step(self, logged: dict[str, Any]) -> None:
        loss, norm = logged["loss_dict"].get("lm loss"), logged["grad_norm"]
        self.steps.append(
            {
                "iteration": logged["iteration"],
                "loss": None if loss is None else float(loss),
                "grad_norm": None if norm is None else float(norm),
                "seconds": None,
            }
        )

    @staticmethod
    def _is_cuda() -> bool:
        from megatron_asynchzp import cpu_platform

        return not cpu_platform.is_installed()

    def write(self, folder: Path) -> None:
        record = {"steps": self.steps, "waits": self.waits}
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(record))


def main(argv: list[str]) -> None:
    if connections := os.environ.get("GPU_CHECK_CONNECTIONS"):
        open_device(connections)
    if preload := os.environ.get("GPU_CHECK_PRELOAD"):
        importlib.import_module(preload)
    recorder = Recorder()
    prepare_process(argv)
    with ExitStack() as stack:
        if longest_s := float(os.environ.get("GPU_CHECK_DELAY_S", "0")):
            stack.enter_context(late_launches(longest_s))
        stack.enter_context(listening(recorder.begin_step, recorder.end_step))
        launch.run_script(SCRIPT, argv)
    recorder.write(Path(os.environ["GPU_CHECK_RECORDS"]))


if __name__ == "__main__":
    main(sys.argv[1:])
