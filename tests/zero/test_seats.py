# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Units that a captured graph reads have one address, in whatever order and direction they are
used, and the memory that the formula says."""

import random
import threading
from collections import defaultdict
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.decisions import ParamsInFlight
from megatron_asynchzp.engine.sharding.in_flight import UnitInFlight, memory_in_flight
from megatron_asynchzp.engine.sharding.memory_map import Extent, MemoryMap
from megatron_asynchzp.engine.sharding.seats import assign_seats
from megatron_asynchzp.engine.zero.calls import wrap_calls
from megatron_asynchzp.engine.zero.step import StepScheduler
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import (
    Program,
    Step,
    UnitShape,
    execute,
    new_unit,
    recorded_groups,
)

SIZES = [(2, 2, 2), (2, 4, 8), (8, 8, 8), (4, 1, 4), (1, 2, 4)]


def draw(dice: random.Random) -> Program:
    units = tuple(
        UnitShape(dice.choice((24, 24, 24, 96)), dice.random() < 0.9, dice.random() < 0.7)
        for _ in range(dice.randint(2, 7))
    )
    root = dice.choice((None, None, 0))
    if root is not None:  # what stays gathered around all others is no layer
        units = (UnitShape(units[0].numel), *units[1:])
    steps = tuple(
        Step(
            dice.randint(1, 3),
            frozenset(i for i in range(1, len(units)) if dice.random() < 0.1),
            dice.randint(0, 2),
            recomputes=dice.random() < 0.3,
            root=root,
            evaluates=dice.random() < 0.3,
            is_begun_again=dice.random() < 0.2,
            is_applied=dice.random() < 0.7,
        )
        for _ in range(dice.randint(2, 4))
    )
    config = ScheduleConfig(
        "main-thread", dice.randint(0, 3), early_update=dice.choice(("on", "off"))
    )
    return Program(units, steps, config, dice.choice(SIZES), dice.randrange(8))


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_unit_has_one_address_over_random_programs_and_nothing_races(monkeypatch, count: int):
    dice = random.Random(count)
    original = HZPUnit.to_unsharded
    places: dict[HZPUnit, set[int]] = defaultdict(set)

    def noted(unit: HZPUnit, full, views) -> None:
        places[unit].add(full.data_ptr())
        original(unit, full, views)

    monkeypatch.setattr(HZPUnit, "to_unsharded", noted)
    num_several = 0
    for number in range(count):
        program = draw(dice)
        places.clear()
        done = execute(program, number)
        assert not done.races, (number, done.races[0])
        for unit, addresses in places.items():
            num_several += len(addresses) > 1
            assert len(addresses) == 1 or not unit.is_seated, (number, unit.name)
        scheduler = done.scheduler
        assert scheduler.gathers.arena.num_held == 0
        assert scheduler.gathers.arena.nbytes >= scheduler.memory.params
        if not scheduler.gathers.warned & {"growth"}:
            assert scheduler.gathers.arena.nbytes == scheduler.memory.params
    assert num_several > count / 10  # units without a seat move


def layer(index: int, nbytes: int, is_seated: bool) -> UnitInFlight:
    return UnitInFlight(f"layer {index}", nbytes, 0, nbytes, 1, is_seated)


def test_equal_layers_take_no_more_memory_than_without_seats():
    for ahead in range(4):
        for count in range(1, 9):
            first, last = layer(-1, 256, False), layer(-2, 512, False)
            needed = [
                memory_in_flight([first, *layers, last], ahead)
                for layers in (
                    [layer(i, 128, is_seated) for i in range(count)] for is_seated in (True, False)
                )
            ]
            assert needed[0] == needed[1]


def test_units_that_are_in_memory_together_have_seats_of_their_own():
    units = [(f"layer {i // 2}", (128, 384)[i % 2]) for i in range(12)]
    for ahead in range(4):
        seats = assign_seats(units, ahead)
        for first in range(0, len(units) - 2 * ahead, 2):
            together = sorted(set(seats[first : first + 2 * (ahead + 1)]))
            assert len(together) == len(seats[first : first + 2 * (ahead + 1)])
            assert all(one[1] <= other[0] for one, other in zip(together, together[1:]))
    same = assign_seats([("one", 128), ("one", 128), ("two", 128), ("two", 128)], 0)
    assert same == [(0, 128), (128, 256), (0, 128), (128, 256)]


def test_less_memory_than_the_seats_need_and_kept_memory_are_refused_in_one_line():
    units = [layer(i, 1024, True) for i in range(5)]
    assert memory_in_flight(units, budget=2048).params == 2048
    with pytest.raises(ConfigurationError, match=r"^memory in flight of .* with CUDA graphs.*$"):
        memory_in_flight(units, budget=2047)
    step, shapes = Step(), (UnitShape(is_seated=True),) * 3
    for kept, flag in (("keep_params_nbytes", "params"), ("keep_grads_nbytes", "grads")):
        config = ScheduleConfig("main-thread", **{kept: 1024})
        with pytest.raises(ConfigurationError, match=rf"^--asynchzp-keep-{flag}-gb .*graph.*$"):
            execute(Program(shapes, (step,), config))


def test_the_states_of_units_with_a_seat_stay_where_a_graph_reads_them():
    done = execute(Program((UnitShape(is_seated=True),) * 2, (Step(),)))
    with pytest.raises(ConfigurationError, match=r"^sleep\(\) does not work with CUDA graphs, .*$"):
        done.scheduler.check_between_steps("sleep()")


class Layer(nn.Linear):
    """Called as a layer of Megatron is."""

    def forward(self, x: torch.Tensor, mask: Any = None, rotary: Any = None, context: Any = None):
        return super().forward(x)


def captured_layer(*args: Any, **kwargs: Any) -> tuple[nn.Module, mock.Mock]:
    """A layer whose graph was captured in a call with these inputs, and the engine."""
    module, runtime, unit = Layer(8, 8), mock.Mock(is_rehearsing=True), mock.Mock()
    unit.name = "layers.0"
    wrap_calls(module, [unit], runtime)
    module(*args, **kwargs)
    runtime.is_rehearsing = False
    assert runtime.mock_calls == []
    return module, runtime


X, MASK, ROTARY = torch.zeros(4, 2, 8), torch.zeros(2, 1, 4, 4, dtype=torch.bool), torch.zeros(4, 8)


def test_what_was_captured_is_called_by_position_or_by_name_and_with_less():
    module, runtime = captured_layer(X, mask=MASK, rotary=(ROTARY, ROTARY))
    module(x=X, mask=MASK, rotary=(ROTARY, ROTARY), context=None)
    assert [call[0] for call in runtime.mock_calls] == ["before_forward", "after_forward"]
    module(X, mask=None, rotary=(ROTARY, ROTARY))  # Megatron makes a mask of zeros
    part, _ = captured_layer(X)  # of a layer whose attention is in no graph
    part(x=X, mask=MASK)


_SHAPE = r"its first tensor of torch.float32 .*\[4, 2, 8\]"


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"x": torch.zeros(4, 1, 8)}, _SHAPE),
        ({"x": torch.zeros(5, 2, 8)}, _SHAPE),
        ({"x": torch.zeros(8)}, _SHAPE),
        ({"x": X.double()}, r"its first tensor of torch.float64 .* with torch.float32"),
        ({"x": X.clone().requires_grad_()}, r"its first .* that needs a gradient"),
        ({"mask": MASK[:1]}, r"mask of torch.bool \[1, .* with torch.bool \[2, 1, 4, 4\]"),
        ({"mask": MASK.float()}, "mask of torch.float32 .* with torch.bool"),
        ({"rotary": ROTARY}, r"rotary of .* with none"),
        ({"rotary": (ROTARY, ROTARY[:1])}, r"rotary\[1\] of .*\[1, 8\], .* \[4, 8\]"),
        ({"context": X}, r"context of .* with none"),
    ],
)
def test_other_inputs_than_were_captured_are_refused_in_one_line(inputs, said):
    module, _ = captured_layer(X, mask=MASK, rotary=(ROTARY, ROTARY))
    called = {"x": X, "mask": MASK, "rotary": (ROTARY, ROTARY), **inputs}
    with pytest.raises(ConfigurationError, match=rf"^layers\.0 is called with {said}.*\. Keep .*$"):
        module(**called)
    called["x"] = called["x"].float()
    module.eval()(**called)  # without a graph


class OnPaper(ParamsInFlight[str, int, None]):
    """Decisions alone, and of which unit the gather began, and the place was given up, in order."""

    def _nothing(self, *_: object) -> None: ...

    wait_for_unshard = finish_reshard = start_param_sync = start_early_send = _nothing  # pyright: ignore

    def start_unshard(self, unit: str, extent: Extent) -> None:
        self.noted = [*getattr(self, "noted", ()), f"{unit} to {extent}"]

    def cancel_unshard(self, unit: str, held: None) -> None:
        self.noted.append(f"{unit} gives up")


def test_two_units_of_one_seat_are_not_in_use_together():
    units = {f"layer {i}": layer(i, 1024, True) for i in range(3)}
    params = OnPaper(units, dict.fromkeys(units, 1024), 1, MemoryMap[int](0), [])
    params.unshard("layer 0")
    params.unshard("layer 1")
    with pytest.raises(ConfigurationError, match="both have the same place in memory. Drop"):
        params.unshard("layer 2")


def test_what_comes_too_early_gives_its_seat_to_the_unit_that_is_needed():
    units = {f"layer {i}": layer(i, 1024, True) for i in range(4)}
    params = OnPaper(units, dict.fromkeys(units, 1024), 1, MemoryMap[int](4096), [])
    for unit in (*units, *reversed(units)):
        params.unshard(unit)
        params.reshard(unit)
    params.restart()
    params.noted.clear()
    for unit in ("layer 0", "layer 3", "layer 1"):  # layer 1 comes ahead, and to the place of 3
        params.unshard(unit)
        params.reshard(unit)
    even, odd = (params.seats[f"layer {i}"] for i in (0, 1))
    assert params.noted == [
        f"layer 0 to {even}",
        f"layer 1 to {odd}",
        "layer 1 gives up",
        f"layer 3 to {odd}",
        f"layer 1 to {odd}",
    ]


def test_what_has_no_seat_takes_no_place_of_what_has_one():
    """It would be gathered again for nothing: a seat is of no use to others."""
    units = {name: layer(i, 1024 + 512 * i, i == 1) for i, name in enumerate(("a", "seated", "b"))}
    params = OnPaper(units, dict.fromkeys(units, 0) | {"seated": 1}, 1, MemoryMap[int](2048), [])
    for unit in units:
        params.unshard(unit)
        params.reshard(unit)
    params.restart()
    params.prefetch()
    assert [note.split()[0] for note in params.noted[-2:]] == ["a", "seated"]
    params.noted.clear()
    params.unshard("b")
    assert params.noted[0] == "a gives up" and "seated gives up" not in params.noted


def test_only_a_view_that_outlives_its_unit_is_refused_where_the_next_one_writes_to_its_seat():
    device, config = RecordingDevice(), ScheduleConfig("main-thread", checks_order=False)
    with device.recording(), torch.no_grad(), closing(start_driver(config, device)) as driver:
        groups = recorded_groups((2, 2, 2), rank=0)
        units = [new_unit(f"u{index}", UnitShape(is_seated=True), groups) for index in range(3)]
        scheduler = StepScheduler(units, config, driver)
        scheduler.zero_grads()
        scheduler.gathers.unshard(units[0])
        kept = units[0].params[0].detach()
        with pytest.raises(
            ConfigurationError, match=r"^u0 keeps views .* Drop --cuda-graph-impl\.$"
        ):
            scheduler.gathers.reshard(units[0])
        scheduler.gathers.unshard(units[1])
        handle = [units[1].params[0].detach()]
        threading.Timer(0.02, handle.clear).start()  # the watchdog's thread, on a busy machine
        scheduler.gathers.reshard(units[1])
        scheduler.settle()
    assert kept.numel()
