# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Check: how often, in a step, the engine holds the host until the GPU is done."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_asynchzp.engine.schedule import ON_STREAMS
from scripts.gpu_check.host_time import new_trainer, small_shape
from scripts.gpu_check.outcome import CheckFailed, Target

# Per step, from its begin to the next one's first gathers. The optimizer of this check waits for
# nothing: whatever is found is the engine's.
BUDGET = 0
_WARM_UP, _STEPS = 3, 4


@contextmanager
def counted_synchronisations(places: Counter[str]) -> Iterator[None]:
    """Add to `places` each implicit wait of the host, by the line of code that made it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            places[f"{warning.filename.rpartition('/')[2]}:{warning.lineno}"] += 1


def per_step(step: Callable[[], Any], places: Counter[str]) -> float:
    """Implicit waits of one step."""
    for _ in range(_WARM_UP):
        step()
    with counted_synchronisations(places):
        for _ in range(_STEPS):
            step()
    return places.total() / _STEPS


def run(target: Target) -> dict[str, Any]:
    device, figures, faults = torch.device(target.device), {}, []
    for schedule in ON_STREAMS:
        trainer, batches = new_trainer(small_shape(), schedule, device)
        where: Counter[str] = Counter()
        found = per_step(lambda: trainer.step(batches), where)  # noqa: B023
        trainer.close()
        figures[schedule] = {"per step": found, **where}
        if found > BUDGET:
            faults.append(f"{schedule}: {found:g} per step ({', '.join(where)})")
    if faults:
        raise CheckFailed(f"more than {BUDGET} implicit waits: {'; '.join(faults)}", figures)
    return figures
