# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The peak of live tensors of a training run, and what a dry run of the same flags predicts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from megatron_asynchzp.testbed import megatron_runs
from megatron_asynchzp.testbed.memory import install_memory_count

_ROOT = Path(__file__).parents[2]

# A process of its own: what a test-bed has replaced in torch must not make a model on the meta
# device real.
_CHILD = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
from megatron_asynchzp.dry_run.measured import measure
for line in sys.stdin:
    flags, ranks = json.loads(line)
    stages = measure(tuple([*flags, "--asynchzp-device", "cpu"]), ranks, ranks).stages
    print(json.dumps([[stage.memory.start, stage.memory.total] for stage in stages]), file=out)
"""


class Peak(NamedTuple):
    """Bytes of live tensors at most: until the model and the optimizer are built, and over all."""

    start: float
    total: float


def predicted_peaks(cases: list[tuple[list[str], int]]) -> list[list[Peak]]:
    """Of each pipeline stage, for each (flags, ranks)."""
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    command = [sys.executable, "-W", "ignore", "-c", _CHILD]
    ended = subprocess.run(command, cwd=_ROOT, input=lines, capture_output=True, text=True)
    if ended.returncode:
        raise AssertionError(ended.stderr[-3000:])
    return [[Peak(*one) for one in json.loads(line)] for line in ended.stdout.splitlines()]


def counted_peak(flags: list[str]) -> Peak:
    """Of this rank. A collective call: it runs pretrain() with `flags`."""
    from megatron.training import training

    count = install_memory_count()
    assert count is not None
    set_up, before, start = training.setup_model_and_optimizer, 0, 0

    def set_up_measured(*args: Any, **kwargs: Any) -> Any:
        nonlocal before, start
        before = count.live_nbytes
        count.reset_peak()
        built = set_up(*args, **kwargs)
        start = count.peak_nbytes
        return built

    with mock.patch.object(training, "setup_model_and_optimizer", set_up_measured):
        megatron_runs.run_pretrain(flags)
    peak = Peak(start - before, count.peak_nbytes - before)
    count.uninstall()
    return peak


def counted_peaks(cases: list[list[str]]) -> list[Peak]:
    """Of this rank, one run after another. Collective."""
    return [counted_peak(flags) for flags in cases]
