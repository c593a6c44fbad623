# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Memory in flight, counted by the allocator, on models with the proportions of real ones: what the
formula allows, and a fraction of memory for each size of unit.
"""

import gc
from collections import Counter
from contextlib import closing

import pytest
import torch

from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding import value_hash as hashes
from megatron_asynchzp.engine.sharding.early_units import preview_nbytes
from megatron_asynchzp.engine.zero.step import StepScheduler
from tests.support.live_memory import counted_allocations
from tests.support.recording_device import RecordingDevice, RecordingHost
from tests.support.scheduler_program import (
    Program,
    Runner,
    Step,
    UnitShape,
    execute,
    new_unit,
    recorded_groups,
)

LAYER, SMALL = 2**16, 2**13
# An embedding and an output layer of 4 layers each; experts of 10 times the rest of a layer; slots
# for gradients of a quarter of a layer, and of a thirtieth of the experts, as in the paper's rows.
# With the most of what memory for each size of unit takes that those rows may take.
MODELS = {
    "embedding": ([4 * LAYER, *[LAYER] * 4, 4 * LAYER], range(6), LAYER, 4.0 / 10.3),
    "experts": ([SMALL, 10 * SMALL] * 3, (0, 0, 1, 1, 2, 2), 4 * SMALL // 3, 12.0 / 33.2),
}


def nbytes_for_each_size(numels: list[int]) -> float:
    """Two slots per size of unit: parameters in bf16; gradients in fp32, with their sums over 8."""
    return sum(numel * min(2, n) * (2 + 4 * 9 / 8) for numel, n in Counter(numels).items())


@pytest.mark.parametrize("model", MODELS)
def test_the_allocator_counts_what_the_formula_says_which_is_a_fraction_of_memory_per_size(model):
    numels, layers, slot, share = MODELS[model]
    config = ScheduleConfig("main-thread", grad_slot_nbytes=slot, checks_order=False)
    device = RecordingDevice()
    with device.recording(), torch.no_grad():
        groups = recorded_groups((8, 8, 8), rank=3)
        units = [new_unit(f"u{i}", UnitShape(numel), groups) for i, numel in enumerate(numels)]
        for unit, layer in zip(units, layers, strict=True):
            unit.layer = f"layer {layer}"
        driver = start_driver(config, device)
        with closing(driver), counted_allocations() as count:
            gc.collect()  # what tests before this one have left
            before = count.live_nbytes
            scheduler = StepScheduler(units, config, driver)
            allocated = count.live_nbytes - before
            count.reset_peak()
            for _ in range(2):
                Runner(scheduler, Step(micro_batches=2)).run()
            peak = count.peak_nbytes - before
            scheduler.settle()
    memory = scheduler.memory
    assert allocated == memory.params + memory.grads
    assert allocated <= share * nbytes_for_each_size(numels)
    assert allocated < peak <= (allocated + memory.own_grads) * 1.01


@pytest.mark.parametrize("kind", ["main-thread", "threaded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_sent_before_the_update_takes_the_copies_of_one_unit_at_a_time(
    dtype, kind, monkeypatch
):
    """Where gradients are reduced in place, so that nothing else comes and goes in backward."""
    numel, peaks = 2**16, list[int]()
    monkeypatch.setattr(hashes, "_WORDS_ON_CPU", 2**8)
    for sends_early in (False, True):
        program = Program(
            (UnitShape(numel),) * 6,
            (Step(), Step()),
            ScheduleConfig(kind, checks_order=False),
            (1, 1, 8),
            dtype=dtype,
            sends_early=sends_early or None,
        )
        with counted_allocations() as count:
            before = count.live_nbytes
            count.reset_peak()
            done = execute(program, new_device=RecordingHost)
            peaks.append(count.peak_nbytes - before)
    unit = done.scheduler.units[0]
    # SGD without momentum has no states to copy.
    shard = unit.model_param.range.numel if dtype == torch.float32 else 0
    allowed_nbytes = preview_nbytes(unit.optim_range.numel, 0, shard_numel=shard) * 1.01
    allowed_nbytes += 3 * 8 * 2**8  # a fingerprint's weights, products and numbers
    if kind == "threaded":
        # Whether a reduction's result, in another thread, is there when the peak is, is chance.
        allowed_nbytes += unit.optim_range.numel * unit.main_grad.storage.itemsize
    assert peaks[1] - peaks[0] <= allowed_nbytes
