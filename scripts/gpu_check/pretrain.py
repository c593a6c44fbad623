# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks pretrain_gpt in bf16 on one rank against stock, with the real communication library."""

import shutil
from typing import Any

from scripts.gpu_check.megatron_runs import require_equal, run_pretrain, training_flags
from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.testbed.megatron_flags import size_flags

STEPS, SAVED_STEP, MICRO_BATCHES = 12, 6, 2
# Rounding to bf16 flips bits, and training amplifies that.
LOSS_TOLERANCE, FIRST_LOSS_TOLERANCE = 5e-3, 1e-5
# One rank communicates with no other: a step may not take much longer than stock's.
MOST_RATIO = 1.25
# Implicit waits of the host per step beyond stock's.
WAIT_BUDGET = 0
_RUN_LIMIT_S = 90.0


def run(target: Target) -> dict[str, Any]:
    folder = target.folder / "pretrain_checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    base = training_flags(target, STEPS, MICRO_BATCHES, "--bf16")
    own = [*base, *size_flags((1, 1, 1))]
    saved = [*own, "--save", str(folder), "--save-interval", str(SAVED_STEP)]
    loaded = [*own, "--load", str(folder), "--ckpt-step", str(SAVED_STEP)]
    stock = run_pretrain(target, "pretrain_stock", 1, base, _RUN_LIMIT_S)
    ours = run_pretrain(target, "pretrain_ours", 1, saved, _RUN_LIMIT_S)
    again = run_pretrain(target, "pretrain_resumed", 1, loaded, _RUN_LIMIT_S)
    shutil.rmtree(folder, ignore_errors=True)
    require_equal("first loss", ours.losses[:1], stock.losses[:1], FIRST_LOSS_TOLERANCE)
    # Of the same parameters; backward need not give the same bits twice, so later ones may differ.
    first_after = ours.losses[SAVED_STEP : SAVED_STEP + 1]
    require_equal("first loss after loading", again.losses[:1], first_after, FIRST_LOSS_TOLERANCE)
    waits = sum(ours.waits.values()) - sum(stock.waits.values())
    ratio = ours.step_s / stock.step_s
    figures = {
        "losses apart": require_equal("losses", ours.losses, stock.losses, LOSS_TOLERANCE),
        "resumed apart": require_equal(
            "losses after loading", again.losses, ours.losses[SAVED_STEP:], LOSS_TOLERANCE
        ),
        "stock step ms": 1e3 * stock.step_s,
        "step ratio": ratio,
        "stock waits per step": sum(stock.waits.values()),
        "more waits than stock": waits,
        "our waits": ours.waits,
    }
    if target.is_large and not ratio <= MOST_RATIO:
        raise CheckFailed(f"a step takes {ratio:.2f} times as long as stock's", figures)
    if waits > WAIT_BUDGET:
        raise CheckFailed(f"{waits:g} more implicit waits per step than stock", figures)
    return figures
