# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer states that are on the host between two updates change no bit, wherever else states are
moved, saved or loaded meanwhile."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp import ConfigurationError, ScheduleConfig, ShardedModel
from megatron_asynchzp.engine.sharding.in_flight import num_on_host
from scripts.testbed.ranks import run_ranks
from tests.support.engine import build_toy
from tests.support.loops import (
    Loop,
    load,
    marking_step,
    of_micro_batches,
    optimizer_params,
    save,
    stepping,
)
from tests.support.selection import slow_unless
from tests.support.toy_models import toy_batch, toy_loss

FP32, BF16 = torch.float32, torch.bfloat16


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def amsgrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, amsgrad=True, fused=True)


def two_groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    groups = [{"params": params[::2], "weight_decay": 0.0}, {"params": params[1::2]}]
    return torch.optim.AdamW(groups, lr=torch.tensor(1e-2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-1, momentum=0.9)


class Assigning(torch.optim.SGD):
    """Puts another tensor in the place of each parameter's values."""

    is_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


def assigning(params: Any) -> torch.optim.Optimizer:
    return Assigning(params, lr=1e-1)


OPTIMIZERS = {
    "assigning": assigning,
    "AdamW": adamw,
    "amsgrad": amsgrad,
    "groups": two_groups,
    "SGD": sgd,
}


def new_sharded(
    sizes: Sequence[int], dtype: torch.dtype, name: str, offload: float, **schedule: Any
) -> ShardedModel:
    loop = Loop(partial(build_toy, dtype), new_optimizer=OPTIMIZERS[name])
    return loop.sharded(sizes, schedule=ScheduleConfig(**schedule), offload=offload)


def evaluate(sharded: ShardedModel) -> None:
    """Its gathers are still there when the update comes."""
    with torch.no_grad():
        toy_loss(sharded.model, toy_batch(5, 2, 0))


STEP = partial(marking_step, step=stepping(between=evaluate))
train = Loop(losses=of_micro_batches, step=STEP).train


def states_of(sharded: ShardedModel) -> list[Any]:
    state = sharded.optimizer.state
    return [
        {key: torch.as_tensor(value).tolist() for key, value in state[param].items()}
        for param in optimizer_params(sharded)
        if param.numel()
    ]


def ends_of(sharded: ShardedModel) -> Any:
    """Weights and states, bit for bit."""
    return {name: value.tolist() for name, value in sharded.full_params()}, states_of(sharded)


def num_away(sharded: ShardedModel) -> int:
    return sum(unit.is_on_host for unit in sharded.runtime.units)


def train_each(
    sizes: Sequence[int], dtype: torch.dtype, name: str, fractions: Sequence[float], schedule: Any
) -> list[Any]:
    found = []
    for fraction in fractions:
        with new_sharded(sizes, dtype, name, fraction, **schedule) as sharded:
            found.append((num_away(sharded), (train(sharded), ends_of(sharded))))
    return found


def train_and_load(sizes: Sequence[int], dtype: torch.dtype, fractions: Sequence[float]) -> Any:
    """Whole values come between two steps, by either way, once behind a sleep."""
    whole, found = build_toy(dtype).state_dict(), []
    for fraction in fractions:
        with new_sharded(sizes, dtype, "AdamW", fraction) as sharded:
            train(sharded, [0])
            sharded.load_full_params(whole if dist.get_rank() == 0 else None)
            losses = train(sharded, [1])
            sharded.sleep(2)
            sharded.wake()
            sharded.model.load_state_dict(whole)
            found.append((losses, train(sharded, [2]), ends_of(sharded)))
    return found


@pytest.mark.parametrize(
    "sizes, dtype, name, schedule",
    [
        ((1, 2, 2), BF16, "groups", {"early_update": "on"}),
        ((2, 2, 2), BF16, "assigning", {}),
        slow_unless(False, (2, 2, 2), FP32, "amsgrad", {}),
        slow_unless(False, (2, 1, 2), BF16, "AdamW", {"kind": "main-thread"}),
        slow_unless(False, (1, 1, 1), FP32, "SGD", {"kind": "inline"}),
    ],
)
def test_losses_norms_weights_and_states_are_those_without_it(sizes, dtype, name, schedule):
    for found in run_ranks(train_each, 2, sizes, dtype, name, (0, 0.01, 1), schedule):
        nums = [num for num, _ in found]
        assert nums[0] == 0 and nums[1] == 1 < nums[2]
        assert all(seen == found[0][1] for _, seen in found)


def test_weights_that_are_loaded_between_two_steps_train_as_without_it():
    for found in run_ranks(train_and_load, 2, (1, 2, 2), BF16, (0, 0.5, 1)):
        assert found[0] == found[1] == found[2]


def save_and_load(folder: Path) -> bool:
    """Between runs with and without it, awake and asleep, into other sizes."""
    saved: list[tuple[Path, Any]] = []
    for fraction in (0.0, 0.7):
        sharded = new_sharded((1, 2, 2), BF16, "AdamW", fraction)
        train(sharded, [0])
        for level in (0, 2):
            if level:
                sharded.sleep(level)
            saved.append((folder / f"{fraction}-{level}", None))
            save(sharded, saved[-1][0])
            if level:
                sharded.wake()
        expected = train(sharded, (1, 2)), ends_of(sharded)[0]
        saved = [(path, expected if end is None else end) for path, end in saved]
        sharded.close()
    assert all(end == saved[0][1] for _, end in saved)
    for index, (path, expected) in enumerate(saved):
        for fraction in (0.0, 1.0) if index == len(saved) - 1 else (float(index % 2),):
            other = new_sharded((2, 2, 2), BF16, "AdamW", fraction)
            train(other, [5])  # states that are written over
            load(other, path)
            own = train(other, (1, 2)), ends_of(other)[0]
            assert own == expected, (path, fraction)
            other.close()
    return True


def test_a_checkpoint_is_the_one_of_a_run_without_it_and_loads_into_either(tmp_path: Path):
    assert all(run_ranks(save_and_load, 2, tmp_path))


class Unknown(torch.optim.AdamW):
    """Not known to be elementwise, although it is."""


class Eager(torch.optim.SGD):
    """Makes states of values that are not there."""

    is_elementwise = True

    def __init__(self, params: Any):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["start"] = param.detach().clone()


def refuse_all() -> list[str]:
    said: list[str] = []

    def refused(action: Callable[[], Any]) -> None:
        try:
            action()
            said.append("nothing")
        except ConfigurationError as error:
            said.append(str(error).partition(";")[0].partition(", so")[0])

    for offload in (1.5, True, "all"):
        refused(lambda one=offload: new_sharded((2, 2, 2), BF16, "AdamW", one))
    refused(lambda: new_sharded((2, 2, 2), BF16, "AdamW", 0.5 * dist.get_rank()))
    for new_optimizer in (Unknown, Eager):
        OPTIMIZERS["other"] = new_optimizer
        refused(lambda: new_sharded((2, 2, 2), BF16, "other", 1.0))
    sharded = new_sharded((2, 2, 2), BF16, "AdamW", 1.0)
    train(sharded, [0])
    param = next(one for one in sharded.optimizer.param_groups[0]["params"] if one.numel())
    assert torch.isnan(param).all()
    refused(lambda: setattr(param, "data", torch.zeros_like(param)))
    refused(lambda: sharded.changing_params().__enter__())
    sharded.close()
    return said


def test_what_it_cannot_be_beside_is_refused_in_one_line():
    kinds = "is not known to update each element from that element alone"
    assert run_ranks(refuse_all, 2)[0] == [
        "offload is 1.5",
        "offload is True",
        "offload is 'all'",
        "offload is 0.0 on rank 0 and 0.5 on rank 1",
        f"optimizer states on the host: Unknown {kinds}",
        "optimizer states on the host: Eager makes states before its first step, when main "
        "parameters are not on the device",
        "param.data of sharded.optimizer's parameters is on the host between two updates, by "
        "offload",
        "the values of the optimizer's parameters cannot be changed where they are on the host: "
        "leave out offload, or change them with model.load_state_dict()",
    ]


def test_the_first_units_are_taken_as_few_as_have_the_part_that_is_asked_for():
    numels = [10, 30, 20, 40]
    taken = {0.0: 0, 0.05: 1, 0.1: 1, 0.11: 2, 0.4: 2, 0.6: 3, 0.61: 4, 1.0: 4}
    assert {part: num_on_host(numels, part) for part in taken} == taken
    assert num_on_host([], 1.0) == 0
