# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters and gradients that stay in memory from one micro-batch to a later one: as few gathers
and reductions as the order of uses allows, whatever a pipeline does, within their budgets, and
stock torch's numbers.
"""

import random
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.schedule import SCHEDULES, ScheduleConfig
from megatron_asynchzp.engine.sharding.in_flight import FP32_NBYTES
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy
from tests.support.live_memory import counted_allocations
from tests.support.pipeline_order import Stage, most_kept_gaps
from tests.support.pipeline_stage import PipelineStage, executed
from tests.support.recording_device import CountingDevice, RecordingDevice
from tests.support.selection import slow_unless

POINTS = [
    (Stage(pp, vpp, micro_batches, rank, recomputes=recomputes), room)
    for pp, vpp, micro_batches in ((1, 1, 4), (4, 1, 8), (4, 2, 8), (2, 4, 4))
    for rank, recomputes in product(sorted({0, pp - 1}), (False, True))
    for room in (0, 1, 3)
]


@pytest.mark.parametrize("stage, room", POINTS, ids=str)
def test_a_stage_gathers_and_reduces_no_more_often_than_the_best_choice_does(stage, room):
    done = executed(CountingDevice(), stage, (room, room))
    params, grads = stage.param_uses(), stage.grad_uses()
    gathers = done.count("gather", 3)
    # Each further chunk has a place in flight of its own, idle while another one computes.
    idle = stage.vpp - 1
    assert len(params) - most_kept_gaps(params, room + idle) <= gathers
    assert gathers <= len(params) - most_kept_gaps(params, room)
    saved = most_kept_gaps(grads, room, counts_own=True)
    assert done.count("reduce", 3) == len(grads) - saved
    assert all(chunk.num_places_in_use() == 0 for chunk in done.chunks)


@pytest.mark.parametrize("stage", [Stage(1, 1, 4), Stage(4, 1, 8), Stage(2, 2, 6)], ids=str)
def test_what_stays_is_neither_written_nor_read_at_a_wrong_time(stage):
    device = RecordingDevice()
    executed(device, stage, (2, 2), depth=1)
    assert device.races == [] and device.num_accesses > 100


def test_two_chunks_kept_leave_less_than_a_tenth_of_the_gathers_of_a_deep_pipeline():
    deep = Stage(pp=8, vpp=4, micro_batches=32)
    none, kept = (executed(CountingDevice(), deep, rooms, steps=2) for rooms in ((0, 0), (4, 2)))
    assert (none.count("gather", 2), none.count("reduce", 2)) == (428, 256)
    assert (kept.count("gather", 2), kept.count("reduce", 2)) == (20, 32)


def test_gradients_kept_for_a_micro_batch_that_does_not_come_are_reduced_at_the_end():
    device = RecordingDevice()
    with device.recording(), torch.no_grad():
        done = PipelineStage(Stage(1, 1, micro_batches=2), (3, 3), device, marks_last=False)
        for micro_batches in (2, 2, 1):
            done.stage = Stage(1, 1, micro_batches)
            done.run_step()
        done.close()
    assert [done.count("reduce", step) for step in (1, 2, 3)] == [4, 2, 2]
    assert device.races == []


# ---- memory


@pytest.mark.parametrize("budget", [4608, 5700, 7000])
def test_what_one_chunk_gathers_ahead_yields_to_what_another_needs_now(budget):
    """The chunks share memory; one of them does each step what the step before has not done."""
    dice, device = random.Random(1), CountingDevice()
    with device.recording(), torch.no_grad():
        stage = Stage(1, 2, 1, layers=8)
        done = PipelineStage(stage, (1, 0), device, depth=8, in_flight_nbytes=budget)
        memory = done.chunks[0].gathers.arena
        before = memory.nbytes
        for _ in range(20):
            for chunk in done.chunks:
                chunk.zero_grads()
            orders = [dice.sample(range(8), 8), list(range(8))]
            for number in dice.sample([0] * 8 + [1] * 8, 16):
                chunk = done.chunks[number]
                unit = chunk.units[orders[number].pop(0)]
                chunk.gathers.unshard(unit)
                chunk.gathers.reshard(unit)
        assert memory.nbytes == before
        done.close()


@pytest.mark.parametrize("stage", [Stage(1, 1, 6), Stage(4, 1, 8), Stage(2, 2, 8)], ids=str)
def test_the_allocator_counts_no_more_for_what_is_kept_than_the_budgets(stage):
    numel = 2**16

    def peak_and_padded(rooms: tuple[int, int]) -> tuple[int, int]:
        with counted_allocations() as count:
            before = count.live_nbytes
            count.reset_peak()
            padded = executed(CountingDevice(), stage, rooms, depth=1, numel=numel).padded
            return count.peak_nbytes - before, padded

    least, padded = peak_and_padded((0, 0))
    for rooms in ((3, 0), (0, 1), (0, 2), (2, 3)):
        params, grads = rooms[0] * 2 * padded, rooms[1] * FP32_NBYTES * padded
        # While the gradient of a parameter becomes fp32, the one of 16 bits is there too; and a CPU
        # adds another one to it by way of a copy in fp32.
        converted = (2 + FP32_NBYTES) * numel * bool(grads)
        more = peak_and_padded(rooms)[0] - least
        assert params + grads / 2 <= more <= (params + grads + converted) * 1.01, rooms


# ---- numbers


def train(sizes, schedule: ScheduleConfig, micro_batches, dtype=torch.float32, **toy):
    """With `keeps_params_in_free_memory` as if rank 0 had plenty left after the first step, and
    rank 1 hardly more than `room_of`."""
    model = build_toy(dtype, depth=3, **toy)
    trainer = EngineTrainer(model, sizes, schedule=schedule)
    losses = []
    for step, count in enumerate(micro_batches):
        losses.append(trainer.step(step, count))
        if schedule.keeps_params_in_free_memory and step == 0:
            trainer.runtime.budgets.params.take_free_memory(
                (2**20, room_of(dtype) + 1)[dist.get_rank()]
            )
    params = trainer.full_params()
    budgets = trainer.runtime.budgets
    found = [
        0 if residency is None else residency.num_hits
        for residency in (budgets.params and budgets.params.residency, budgets.grads)
    ]
    trainer.runtime.close()
    assert trainer.runtime.num_places_in_use() == 0
    return losses, params, found


TOYS = ({}, {"is_tied": True}, {"recompute": True})
DTYPES = (torch.float32, torch.bfloat16)
MICRO_BATCHES = (3, 3, 2, 4, 4, 4)


def room_of(dtype) -> int:
    """Bytes for some of the parameters that could stay, but not for all."""
    return 2**12 * dtype.itemsize


def compare_with_none(toys, kinds, dtypes) -> int:
    """Each model with a budget for parameters, and with one for gradients too, beside none."""
    num_compared = 0
    for toy, dtype in product(toys, dtypes):
        for kind in kinds:
            sizes = (dist.get_world_size(),) * 3
            plain = ScheduleConfig(kind)
            losses, params, _ = train(sizes, plain, MICRO_BATCHES, dtype, **toy)
            given = {"keep_params_nbytes": room_of(dtype)}, {"keeps_params_in_free_memory": True}
            uses_found = set()
            for options in given:
                kept = ScheduleConfig(kind, **options)
                mine_losses, mine, found = train(sizes, kept, MICRO_BATCHES, dtype, **toy)
                uses_found.add(found[0])
                assert mine_losses == losses, (toy, kind)
                for name in params:  # the same sums: every bit
                    assert torch.equal(mine[name], params[name]), (toy, kind, name)
            # The least of what the ranks have left is as much, and all of them keep that.
            assert len(uses_found) == 1 and min(uses_found) > 0, (toy, kind, uses_found)
            kept = ScheduleConfig(kind, keep_params_nbytes=room_of(dtype), keep_grads_nbytes=2**15)
            mine_losses, mine, found = train(sizes, kept, MICRO_BATCHES, dtype, **toy)
            assert found[0] > 0 and found[1] > 0, (toy, kind)
            for name in params:  # in another order
                close = 1e-4 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(mine[name], params[name], rtol=0, atol=close)
            num_compared += 1
    return num_compared


@pytest.mark.parametrize(
    "toys, kinds, dtypes",
    [
        slow_unless(True, TOYS[2:], ("threaded",), DTYPES[1:], id="one"),
        slow_unless(False, TOYS, SCHEDULES, DTYPES, id="all"),
    ],
)
def test_what_stays_changes_no_bit_but_by_the_order_in_which_gradients_are_added(
    toys, kinds, dtypes
):
    num_compared = len(toys) * len(dtypes) * len(kinds)
    assert run_ranks(compare_with_none, 2, toys, kinds, dtypes) == [num_compared] * 2
