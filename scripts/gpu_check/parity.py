# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that --use-asynchzp trains as stock DDP does on 2, 4 or 8 ranks."""

from typing import Any

from megatron_asynchzp.engine.schedule import AUTO
from scripts.gpu_check.megatron_runs import require_equal, run_pretrain, training_flags
from scripts.gpu_check.outcome import Target
from scripts.testbed.megatron_flags import size_flags

STEPS = 6
TOLERANCE = 1e-5
# Of two runs of stock: where they differ by more, nothing can be compared with them.
MOST_NOISE = 1e-3
SIZES = {2: [(2, 2, 2)], 4: [(2, 4, 4), (4, 1, 4)], 8: [(2, 4, 8), (8, 8, 8)]}
# Each choice of sizes in another schedule: they give the same bits, as loopback shows.
_SCHEDULES = (AUTO, "inline")
_RUN_LIMIT_S = 120.0


def run(target: Target, ranks: int) -> dict[str, Any]:
    base = training_flags(target, STEPS, 2 * ranks)
    stock = run_pretrain(target, f"parity_{ranks}_stock", ranks, base, _RUN_LIMIT_S)
    again = run_pretrain(target, f"parity_{ranks}_stock_again", ranks, base, _RUN_LIMIT_S)
    noise = max(
        require_equal("losses of two runs of stock", again.losses, stock.losses, MOST_NOISE),
        require_equal("norms of two runs of stock", again.grad_norms, stock.grad_norms, MOST_NOISE),
    )
    limit = TOLERANCE + 2 * noise
    figures: dict[str, Any] = {"stock step ms": 1e3 * stock.step_s, "stock against stock": noise}
    for sizes, schedule in zip(SIZES[ranks], _SCHEDULES):
        name = f"parity_{ranks}_{'_'.join(map(str, sizes))}_{schedule}"
        flags = [*base, *size_flags(sizes), "--asynchzp-schedule", schedule]
        ours = run_pretrain(target, name, ranks, flags, _RUN_LIMIT_S)
        figures[name] = {
            "losses apart": require_equal(f"{name}, losses", ours.losses, stock.losses, limit),
            "norms apart": require_equal(
                f"{name}, gradient norms", ours.grad_norms, stock.grad_norms, limit
            ),
            "step ratio": ours.step_s / stock.step_s,
        }
    return figures
