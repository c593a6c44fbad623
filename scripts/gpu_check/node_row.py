# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the 9B model on one node of 8 GPUs against stock."""

import statistics
from typing import Any

from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.gpu_check.process import run_command
from scripts.report.megatron_log import Iteration, parse_log

RANKS, STEPS, SKIPPED_STEPS = 8, 10, 3
STOCK, OURS = "node-9b-nd", "node-9b-hzp"
# Name of a run: its row and its settings.
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "stock": (STOCK, {}),
    "ours": (OURS, {}),
    "ours, 16 channels": (OURS, {"NCCL_MAX_CTAS": "16"}),
    "ours, 8 channels": (OURS, {"NCCL_MAX_CTAS": "8"}),
    "ours, high priority": (OURS, {"TORCH_NCCL_HIGH_PRIORITY": "1"}),
}
# Two models that differ in nothing but how they are cut: the first loss differs by rounding.
FIRST_LOSS_TOLERANCE = 1e-2
_RUN_LIMIT_S = 420.0


def run_row(target: Target, name: str, steps: int = STEPS) -> list[Iteration]:
    """The steps that one run of launch.sh printed. Raises CheckFailed."""
    row, env = RUNS[name]
    more = ["--train-iters", str(steps), "--eval-iters", "0"]
    log = target.folder / f"node_row_{name.replace(', ', '_').replace(' ', '_')}.log"
    command = ["bash", "scripts/train/launch.sh", row, "--", *more]
    ended = run_command(command, log, _RUN_LIMIT_S, env)
    found = parse_log(ended.lines)
    if ended.status != 0 or len(found) != steps:
        raise CheckFailed(f"{name}: {len(found)} of {steps} steps; {ended.describe(_RUN_LIMIT_S)}")
    return found


def median_ms(found: list[Iteration]) -> float:
    return statistics.median(step.step_ms for step in found[SKIPPED_STEPS:])


def run(target: Target) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    stock = run_row(target, "stock")
    figures["stock"] = {"step ms": median_ms(stock)}
    for name in list(RUNS)[1:]:
        ours = run_row(target, name)
        exposed = [step.exposed_comm_ms for step in ours[SKIPPED_STEPS:]]
        figures[name] = {
            "step ms": median_ms(ours),
            "step ratio": median_ms(ours) / median_ms(stock),
            "exposed ms": statistics.median(ms for ms in exposed if ms is not None),
        }
        apart = abs(ours[0].loss - stock[0].loss) / stock[0].loss
        if not apart <= FIRST_LOSS_TOLERANCE:
            raise CheckFailed(f"{name}: its first loss is {apart:.1e} from stock's", figures)
    return figures
