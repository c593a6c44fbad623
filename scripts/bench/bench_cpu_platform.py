# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the CPU platform costs: one step of the same GPTModel in a plain torch loop without the
platform, in the same loop with it, and in Megatron's pretrain(). Prints a table and a JSON line.
"""

import contextlib
import json
import statistics
import time
from typing import Any
from unittest import mock

import torch

from scripts.testbed.machine import machine, versions
from scripts.testbed.megatron_flags import shape_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from scripts.testbed.ranks import run_ranks

SIZES = {
    "2 layers, hidden 64, seq 32": [],
    "4 layers, hidden 256, seq 128": shape_flags(4, 256, 128),
}
ROUNDS, STEPS = 5, 24
BLOCK = 4  # steps in a row of one kind; the first block of each round warms up, uncounted


def main():
    from rich.console import Console
    from rich.table import Table

    place = machine() | versions("torch", "megatron-core")
    table = Table("model", "step", "median ms", "min", "max", title="One training step, 1 rank")
    for size, (flags, steps_s) in zip(SIZES, run_ranks(measure, 1, timeout_s=600)[0], strict=True):
        for kind, times_s in steps_s.items():
            row = [f"{1e3 * f(times_s):.2f}" for f in (statistics.median, min, max)]
            table.add_row(size, kind, *row)
            found = {"bench": "cpu_platform", "model": size, "step": kind, "flags": flags}
            found |= dict(zip(("median_ms", "min_ms", "max_ms"), map(float, row), strict=True))
            print(json.dumps(found | {"samples": len(times_s)} | place))
    Console().print(table)


def measure() -> list[tuple[list[str], dict[str, list[float]]]]:
    """Seconds of every step, per size and kind; the kinds take turns, round by round."""
    found = []
    for flags in SIZES.values():
        argv = gpt_args(*flags, "--global-batch-size", "1", "--train-iters", str(STEPS))
        steps_s: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            record = run_pretrain(argv, inspect=_time_loops)
            for kind, times_s in (record.inspected | {"pretrain()": record.step_s}).items():
                steps_s.setdefault(kind, []).extend(times_s[BLOCK:])
        found.append((flags, steps_s))
    return found


def _time_loops(model_chunks: list, optimizer: Any) -> dict[str, list[float]]:
    """Called inside a run, while Megatron's groups and generators exist."""
    from megatron_asynchzp import cpu_platform

    step = _plain_step()
    found: dict[str, list[float]] = {"plain loop, no platform": [], "plain loop, platform": []}
    for _ in range(0, STEPS, BLOCK):  # in turns: the machine may be busy for a while
        found["plain loop, platform"] += _time(step)
        cpu_platform.uninstall()
        try:
            with _bare_megatron():
                found["plain loop, no platform"] += _time(step)
        finally:
            cpu_platform.install()
    return found


def _plain_step() -> Any:
    """One step of a GPTModel of the run's size: forward, backward, AdamW."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args
    from megatron.training.argument_utils import gpt_config_from_args

    args = get_args()
    config = gpt_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(args.seq_length)[None]

    def step():
        model(tokens, tokens, None, labels=tokens).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def _bare_megatron():
    """What a GPTModel needs to step on a CPU without the platform: no fork of the CUDA generator
    (dropout is 0), its causal mask on the CPU, and no compilation."""
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with (
        mock.patch.object(get_cuda_rng_tracker(), "fork", lambda *_: contextlib.nullcontext()),
        mock.patch.object(fused_softmax, "get_default_causal_mask", _causal_mask),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _causal_mask(size: int) -> torch.Tensor:
    return torch.triu(torch.ones(size, size), diagonal=1).bool()


def _time(step: Any) -> list[float]:
    times_s = []
    for _ in range(BLOCK):
        start_s = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - start_s)
    return times_s


if __name__ == "__main__":
    main()
