# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters and gradients that stay in memory from one micro-batch to a later one: as few gathers
and reductions as the order of uses allows, whatever a pipeline does, and stock torch's numbers.
"""

from collections import Counter
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.sharding.in_flight import FP32_NBYTES
from megatron_asynchzp.testbed.ranks import run_ranks
from megatron_asynchzp.zero.config import SCHEDULES, ScheduleConfig
from megatron_asynchzp.zero.step import Stays, StepScheduler
from tests.support.engine import EngineTrainer, build_toy
from tests.support.pipeline_order import Stage, Use, most_kept_gaps
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import UnitShape, delayed_driver, new_unit, recorded_groups
from tests.support.selection import slow_unless

NUMEL = 64


class PipelineStage:
    """The chunks of one rank, whose schedulers run what a Stage says. marks_last: whether the last
    micro-batch is known to be it while it runs."""

    def __init__(
        self,
        stage: Stage,
        room: int,
        device: RecordingDevice,
        depth: int = 0,
        marks_last: bool = True,
    ):
        self.marks_last = marks_last
        self.stage, groups = stage, recorded_groups((2, 4, 8), 0)
        shape = UnitShape(NUMEL)
        padded = new_unit("u", shape, groups).layout.padded_numel
        config = ScheduleConfig(
            "main-thread",
            prefetch_depth=depth,
            keep_params_nbytes=room * 2 * padded,
            keep_grads_nbytes=room * FP32_NBYTES * padded,
        )
        self.driver = delayed_driver(device, config, 0)
        self.submitted: Counter[tuple[str, int]] = Counter()
        self._note_tasks()
        self.stays = Stays.of(config, self.driver, torch.device("cpu"))
        self.chunks = [
            StepScheduler(
                [new_unit(f"{chunk}.{layer}", shape, groups) for layer in range(stage.layers)],
                config,
                self.driver,
                stays=self.stays,
            )
            for chunk in range(stage.vpp)
        ]

    def _note_tasks(self) -> None:
        submit = self.driver.submit

        def noted_submit(task):
            self.submitted[task.lane, self.driver.step] += 1
            return submit(task)

        self.driver.submit = noted_submit

    def _unit(self, use: Use):
        return self.chunks[use[0]].units[use[1]]

    def run_step(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grads()
        left = Counter(self.stage.grad_uses())
        for phase, use in self.stage.turns():
            chunk, unit = self.chunks[use[0]], self._unit(use)
            chunk.gathers.use(unit)
            for param in unit.params:
                param.sum()
            chunk.gathers.release(unit)
            if phase == "B":
                for param in unit.params:
                    param.grad = torch.ones(param.shape, dtype=param.dtype)
                left[use] -= 1
                chunk.is_last_micro_batch = self.marks_last and left[use] == 0
                chunk.reduce(unit)
        for chunk in self.chunks:
            chunk.sync_grads()
            chunk.sync_params()

    def close(self) -> None:
        for chunk in self.chunks:
            chunk.settle()
        self.driver.close()


POINTS = [
    (Stage(pp, vpp, micro_batches, rank, recomputes=recomputes), room)
    for pp, vpp, micro_batches in ((1, 1, 4), (2, 1, 6), (4, 1, 8), (2, 2, 6), (4, 2, 8), (2, 4, 4))
    for rank, recomputes in product(sorted({0, pp - 1}), (False, True))
    for room in (0, 1, 3)
]


@pytest.mark.parametrize("stage, room", POINTS, ids=str)
def test_a_stage_gathers_and_reduces_no_more_often_than_the_best_choice_does(stage, room):
    device = RecordingDevice()
    with device.recording(), torch.no_grad():
        done = PipelineStage(stage, room, device)
        for _ in range(3):
            done.run_step()
        done.close()
    params, grads = stage.param_uses(), stage.grad_uses()
    assert device.races == []
    gathers = done.submitted["gather", 3]
    # Each further chunk has a place in flight of its own, idle while another one computes.
    idle = stage.vpp - 1
    assert len(params) - most_kept_gaps(params, room + idle) <= gathers
    assert gathers <= len(params) - most_kept_gaps(params, room)
    saved = most_kept_gaps(grads, room, counts_own=True)
    assert done.submitted["reduce", 3] == len(grads) - saved
    assert all(chunk.num_places_in_use() == 0 for chunk in done.chunks)


def test_two_chunks_kept_leave_less_than_a_tenth_of_the_gathers_of_a_deep_pipeline():
    gathers = {}
    for room in (0, 4):
        device = RecordingDevice()
        with device.recording(), torch.no_grad():
            done = PipelineStage(Stage(pp=8, vpp=4, micro_batches=32), room, device)
            for _ in range(2):
                done.run_step()
            done.close()
        gathers[room] = done.submitted["gather", 2]
    assert gathers[4] <= 29 and gathers[4] < gathers[0] / 10, gathers


def test_gradients_kept_for_a_micro_batch_that_does_not_come_are_reduced_at_the_end():
    device = RecordingDevice()
    with device.recording(), torch.no_grad():
        done = PipelineStage(Stage(1, 1, micro_batches=2), 3, device, marks_last=False)
        for micro_batches in (2, 2, 1):
            done.stage = Stage(1, 1, micro_batches)
            done.run_step()
        done.close()
    assert [done.submitted["reduce", step] for step in (1, 2, 3)] == [4, 2, 2]
    assert device.races == []


# ---- numbers


def train(sizes, schedule: ScheduleConfig, micro_batches, dtype=torch.float32, **toy):
    model = build_toy(dtype, depth=3, **toy)
    trainer = EngineTrainer(model, sizes, schedule=schedule)
    losses = [trainer.step(step, count) for step, count in enumerate(micro_batches)]
    params = trainer.full_params()
    stays = trainer.runtime.stays
    found = [
        0 if residency is None else residency.num_found
        for residency in (stays.params and stays.params.residency, stays.grads)
    ]
    trainer.runtime.detach()
    assert trainer.runtime.num_places_in_use() == 0
    return losses, params, found


TOYS = ({}, {"is_tied": True}, {"recompute": True})
MICRO_BATCHES = (3, 3, 2, 4, 4, 4)


def compare_with_none(toys, kinds) -> int:
    """Each model with a budget for parameters, and with one for gradients too, beside none."""
    num_compared = 0
    for toy, dtype in product(toys, (torch.float32, torch.bfloat16)):
        for kind in kinds:
            sizes = (dist.get_world_size(),) * 3
            plain = ScheduleConfig(kind)
            losses, params, _ = train(sizes, plain, MICRO_BATCHES, dtype, **toy)
            kept = ScheduleConfig(kind, keep_params_nbytes=2**14)
            mine_losses, mine, found = train(sizes, kept, MICRO_BATCHES, dtype, **toy)
            assert found[0] > 0, (toy, kind)
            assert mine_losses == losses, (toy, kind)
            for name in params:  # the same sums: every bit
                assert torch.equal(mine[name], params[name]), (toy, kind, name)
            kept = ScheduleConfig(kind, keep_params_nbytes=2**14, keep_grads_nbytes=2**15)
            mine_losses, mine, found = train(sizes, kept, MICRO_BATCHES, dtype, **toy)
            assert found[0] > 0 and found[1] > 0, (toy, kind)
            for name in params:  # in another order
                close = 1e-4 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(mine[name], params[name], rtol=0, atol=close)
            num_compared += 1
    return num_compared


@pytest.mark.parametrize(
    "toys, kinds",
    [
        slow_unless(True, TOYS[2:], ("threaded",), id="one"),
        slow_unless(False, TOYS, SCHEDULES, id="all"),
    ],
)
def test_what_stays_changes_no_bit_but_by_the_order_in_which_gradients_are_added(toys, kinds):
    num_compared = len(toys) * 2 * len(kinds)
    assert run_ranks(compare_with_none, 2, toys, kinds) == [num_compared] * 2
