# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that are reduced piece by piece: the bits of those reduced at once, in memory of a
fixed size.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.schedule import ON_STREAMS, SCHEDULES, ScheduleConfig
from megatron_asynchzp.engine.zero.step import StepScheduler
from megatron_asynchzp.engine.zero.taken_grads import take_grads, write_grads
from megatron_asynchzp.engine.zero.unit import HZPUnit
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy
from tests.support.recording_device import RecordingDevice, RecordingHost
from tests.support.scheduler_program import UnitShape, new_unit, recorded_groups

PIECES, ALL = 2048, 2**20


def compare_slot_sizes() -> list[int]:
    """How many pieces the largest unit has, by slot size, where losses and parameters are equal."""
    seen, counts = [], []
    for kind, slot, memory in (("inline", ALL, 1.0), ("threaded", PIECES, 0.0)):
        schedule = ScheduleConfig(kind, grad_slot_nbytes=slot)
        model = build_toy(torch.bfloat16, is_tied=True)
        trainer = EngineTrainer(model, (1, 2, 4), schedule=schedule, memory=memory)
        losses = [trainer.step(step, 2) for step in range(2)]
        in_flight = [unit.in_flight(slot) for unit in trainer.runtime.units]
        counts.append(max(unit.num_pieces for unit in in_flight))
        seen.append((losses, trainer.full_params()))
        trainer.runtime.close()
    for losses, params in seen[1:]:
        assert losses == seen[0][0]
        assert all(torch.equal(params[name], seen[0][1][name]) for name in params)
    return counts


def test_gradients_in_pieces_are_those_in_one_piece_in_every_bit():
    for counts in run_ranks(compare_slot_sizes, 4):
        assert counts[0] == 1 and counts[1] > 3


def reduced_in_turn(
    device: RecordingDevice,
    kind: str,
    slot_nbytes: int,
    collect: Callable[[StepScheduler, HZPUnit], object],
) -> tuple[int, int]:
    """The memory in flight after two steps that begin with enough for one piece, and that of a
    piece. `collect` gives a unit its gradients: the root's norm comes first and is reduced last."""
    config = ScheduleConfig(kind, 0, grad_slot_nbytes=slot_nbytes)
    with device.recording(), torch.no_grad():
        driver = start_driver(config, device)
        device.attend(driver)
        groups = recorded_groups((1, 4, 8), rank=0)
        units = [new_unit(name, UnitShape(900), groups) for name in ("root", "one", "two")]
        piece = max(unit.in_flight(slot_nbytes).grads for unit in units)
        scheduler = StepScheduler(units, replace(config, in_flight_nbytes=piece), driver)
        for _ in range(2):
            scheduler.zero_grads()
            for unit in units:
                collect(scheduler, unit)
                if unit is not units[0]:
                    scheduler.reduce(unit)
            scheduler.reduce(units[0])
            scheduler.sync_grads()
        in_flight = sum(scheduler.in_flight_nbytes().values())
        scheduler.settle()
        driver.close()
    assert device.races == []
    return in_flight, piece


@pytest.mark.parametrize(
    "new_device, kind",
    [*product([RecordingDevice], ON_STREAMS), *product([RecordingHost], SCHEDULES)],
)
def test_a_unit_that_collects_gradients_to_the_end_of_backward_holds_up_no_other(kind, new_device):
    """Memory for a single piece is enough for any number of units that have gradients."""

    def collect(scheduler: StepScheduler, unit: HZPUnit) -> None:
        for index, param in enumerate(unit.params):
            param.grad = torch.ones(param.shape, dtype=param.dtype)
            scheduler.reductions.take(unit, (index,))

    in_flight, piece = reduced_in_turn(new_device(), kind, 1, collect)
    assert in_flight == piece


def test_another_gradient_of_the_same_parameter_is_added_in_fp32():
    groups = recorded_groups((1, 4, 8), rank=0)
    unit = new_unit("one", UnitShape(8), groups)
    taken: dict[int, torch.Tensor] = {}
    for value in (256.0, 1.0, 1.0):  # in bf16 the sum would stay 256
        unit.params[1].grad = torch.full((3,), value, dtype=torch.bfloat16)
        take_grads(unit, (0, 1), taken)
    assert list(taken) == [1] and taken[1].tolist() == [258.0] * 3


def test_where_layers_write_gradients_themselves_memory_grows_for_those_that_come_late():
    """A unit's place is taken when its backward begins; the root's ends last."""

    def collect(scheduler: StepScheduler, unit: HZPUnit) -> None:
        unit.fuse_grads(overwrites=True)
        scheduler.reductions.provide(unit)
        for param in unit.params:
            param.main_grad.fill_(1.0)
            param.grad, param.grad_added_to_main_grad = torch.empty_like(param), True

    in_flight, piece = reduced_in_turn(RecordingDevice(), "main-thread", 2**20, collect)
    assert in_flight == 2 * piece


@pytest.mark.parametrize("without", [0, 1])
def test_a_parameter_without_a_gradient_keeps_none_of_the_others_from_their_places(without):
    unit = new_unit("u", UnitShape(24), recorded_groups((1, 1, 1), 0), torch.float32)
    places = [torch.full(param.shape, 5.0) for param in unit.params]
    unit.params[1 - without].grad = torch.ones_like(unit.params[1 - without])
    write_grads(unit, [0, 1], places, set())
    assert (places[without] == 5).all() and (places[1 - without] == 1).all()
    assert all(param.grad is None for param in unit.params)
