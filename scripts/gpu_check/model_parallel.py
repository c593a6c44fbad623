# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that nothing hangs with tensor and pipeline parallelism, and that numbers are stock's."""

from collections.abc import Mapping
from typing import Any

from scripts.gpu_check.megatron_runs import require_equal, run_pretrain, training_flags
from scripts.gpu_check.outcome import Target
from scripts.testbed.megatron_flags import size_flags

RANKS, STEPS, MICRO_BATCHES = 4, 20, 4
CONNECTIONS = (1, 8, 32)
LONGEST_DELAY_S = 0.002
TOLERANCE = 1e-4  # twenty steps in fp32
WAYS: Mapping[str, tuple[str, ...]] = {
    "tp2_dp2": ("--tensor-model-parallel-size", "2"),
    "pp2_dp2": ("--pipeline-model-parallel-size", "2"),
}
_RUN_LIMIT_S = 120.0


def run(
    target: Target,
    ways: Mapping[str, tuple[str, ...]] = WAYS,
    connections: tuple[int, ...] = CONNECTIONS,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Run the default schedule with the variables that are shipped."""
    figures: dict[str, Any] = {}
    for way, flags in ways.items():
        base = training_flags(target, steps, 2 * MICRO_BATCHES, *flags)
        env = {"GPU_CHECK_CONNECTIONS": "1"}
        stock = run_pretrain(target, f"{way}_stock", RANKS, base, _RUN_LIMIT_S, env)
        for number in connections:
            name = f"{way}_{number}_connections"
            env = {"GPU_CHECK_CONNECTIONS": str(number), "GPU_CHECK_DELAY_S": str(LONGEST_DELAY_S)}
            ours = run_pretrain(
                target, name, RANKS, [*base, *size_flags((2, 2, 2))], _RUN_LIMIT_S, env
            )
            figures[name] = {
                "losses apart": require_equal(name, ours.losses, stock.losses, TOLERANCE),
                "step ratio": ours.step_s / stock.step_s,
            }
    return figures
