# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Check: a collective that never ends is one line that names it, and status 1."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_asynchzp.engine.schedule import ON_STREAMS
from scripts.gpu_check.outcome import CheckFailed, Target
from scripts.gpu_check.process import Ended, run_command

LIMIT_S = 3.0
# From the limit to the end of the process: what the engine allows itself, twice.
_END_S = 25.0
_START_S = 60.0


_RUN_S = _START_S + LIMIT_S + _END_S


def train(target: Target, schedule: str) -> Ended:
    command = [sys.executable, "-m", "scripts.gpu_check.endless_run"]
    log = target.folder / f"endless_{schedule}.log"
    return run_command([*command, schedule, target.device, str(LIMIT_S)], log, _RUN_S)


def run(target: Target, schedules: Sequence[str] = ON_STREAMS) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with ThreadPoolExecutor() as pool:  # at the same time: they wait most of theirs
        runs = list(pool.map(lambda schedule: train(target, schedule), schedules))
    for schedule, ended in zip(schedules, runs, strict=True):
        own = ended.own_lines
        figures[schedule] = own[0] if own else "no line"
        if ended.status != 1:
            raise CheckFailed(f"{schedule}: {ended.describe(_RUN_S)}", figures)
        if len(own) != 1 or f"after {LIMIT_S:g} s" not in own[0]:
            raise CheckFailed(f"{schedule}: printed {own or 'no line of ours'}", figures)
        if any(line.startswith("Traceback") for line in ended.lines):
            raise CheckFailed(f"{schedule}: printed a traceback with its line", figures)
    return figures
