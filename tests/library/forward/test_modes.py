# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The modes in which a caller may be: torch.inference_mode and torch.no_grad leave no trace in the
steps that follow."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_asynchzp import ShardedModel, ShardSizes, shard
from scripts.testbed.ranks import run_ranks
from tests.support.loops import (
    CLIP,
    Loop,
    assert_refused,
    backward_all,
    load,
    optimizer_params,
    save,
)

MODES = torch.inference_mode, torch.no_grad
Call = Callable[[ShardedModel, Path], object]
"""A call of the engine, given a folder that the ranks share."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def new_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=torch.tensor(1e-2), amsgrad=True)


def losses_of(model: nn.Module, *_: int) -> list[torch.Tensor]:
    return [model(torch.arange(8.0).view(2, 4)).square().sum()]


LOOP = Loop(build, losses_of, new_optimizer=new_adamw, units=lambda model: [model[0], model[2]])


def train(sharded: ShardedModel, steps: int) -> list[float]:
    """Return the norms."""
    return [norm for _, norm in LOOP.train(sharded, range(steps))]


def evaluate(sharded: ShardedModel, _: Path) -> None:
    sharded.model.eval()
    sharded.model(torch.ones(2, 4))
    sharded.model.train()


def sleep_and_wake(sharded: ShardedModel, _: Path) -> None:
    sharded.sleep(2)
    sharded.wake()


def write_params(sharded: ShardedModel, _: Path) -> None:
    with sharded.changing_params():
        for param in optimizer_params(sharded):
            param.copy_(param.clone())


def stream_changes(sharded: ShardedModel, _: Path) -> None:
    sharded.mark_weights("now")
    assert list(sharded.stream_changes("now")) is not None
    sharded.forget_mark("now")


def whole_values(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    buffers = {f"1.{name}": value for name, value in sharded.model[1].named_buffers()}
    return {name: value.clone() for name, value in sharded.full_params()} | buffers


def set_micro_batches(sharded: ShardedModel, _: Path) -> None:
    sharded.set_is_last_micro_batch(False)
    with sharded.no_sync():
        pass


def load_optimizer(sharded: ShardedModel, _: Path) -> None:
    sharded.optimizer.load_state_dict(sharded.optimizer.state_dict())


def read_grads(sharded: ShardedModel, _: Path) -> None:
    for param in optimizer_params(sharded):
        assert param.grad is None or param.grad.isfinite().all()


def trace(sharded: ShardedModel, folder: Path) -> None:
    with sharded.trace(folder / f"trace_{torch.distributed.get_rank()}.json"):
        evaluate(sharded, folder)


# By the name of the public method that a call is about; all others follow.
CALLS: dict[str, Call] = {
    "zero_grad": lambda sharded, _: sharded.zero_grad(),
    "no_sync, set_is_last_micro_batch": set_micro_batches,
    "changing_params": write_params,
    "sleep, wake": sleep_and_wake,
    "state_dict, load_state_dict": lambda sharded, folder: (
        save(sharded, folder / "own"),
        load(sharded, folder / "own"),
    ),
    "full_params": lambda sharded, _: whole_values(sharded),
    "stream_weights": lambda sharded, _: [value.sum() for _, value in sharded.stream_weights()],
    "stream_changes, mark_weights, forget_mark": stream_changes,
    "load_full_params": lambda sharded, _: sharded.load_full_params(whole_values(sharded)),
    "register_forward_method": lambda sharded, _: sharded.register_forward_method(
        sharded.model[0], "extra_repr"
    ),
    "take_report": lambda sharded, _: sharded.take_report(),
    "trace": trace,
    "clip_grad_norm_": lambda sharded, _: (sharded.zero_grad(), sharded.clip_grad_norm_(1.0)),
    "the model": evaluate,
    "the model's zero_grad": lambda sharded, _: sharded.model.zero_grad(),
    "the model's load_state_dict": lambda sharded, _: sharded.model.load_state_dict(
        whole_values(sharded)
    ),
    "the optimizer's zero_grad": lambda sharded, _: sharded.optimizer.zero_grad(),
    "the optimizer's load_state_dict": load_optimizer,
    "a gradient": read_grads,
}
IN_PHASES = {"step", "close"}  # see check_phases


def assert_same(sharded: ShardedModel, expected: dict[str, torch.Tensor], case: object) -> None:
    for key, value in whole_values(sharded).items():
        assert torch.equal(value, expected[key]), (case, key)


def check_first_calls(folder: Path, mode: Callable[[], Any]) -> None:
    with LOOP.sharded((2, 2, 2)) as sharded:
        norms, expected = train(sharded, 1), whole_values(sharded)
    for name, call in CALLS.items():
        with LOOP.sharded((2, 2, 2)) as sharded:
            with mode():
                call(sharded, folder)
            assert train(sharded, 1) == norms, (mode, name)
            assert_same(sharded, expected, (mode, name))


def check_calls_between_steps(folder: Path, mode: Callable[[], Any]) -> None:
    for sizes in (2, 2, 2), (1, 1, 2):
        with LOOP.sharded(sizes) as sharded:
            norms = train(sharded, len(CALLS))
            expected = whole_values(sharded)
        with LOOP.sharded(sizes) as sharded:
            for norm, (name, call) in zip(norms, CALLS.items(), strict=True):
                with mode():
                    call(sharded, folder)
                assert train(sharded, 1) == [norm], (sizes, mode, name)
            assert_same(sharded, expected, (sizes, mode))


@pytest.mark.parametrize(
    "check, mode",
    [
        (check_first_calls, torch.inference_mode),
        *((check_calls_between_steps, mode) for mode in MODES),
    ],
)
def test_a_step_after_any_call_in_an_inference_mode_has_the_bits_of_one_without(
    tmp_path, check, mode
):
    run_ranks(check, 2, tmp_path, mode)


def test_every_public_method_is_among_the_calls():
    names = {name for call in CALLS for name in call.split(", ")} | IN_PHASES
    public = {name for name, _ in inspect.getmembers(ShardedModel, inspect.isfunction)}
    assert {name for name in public if not name.startswith("_")} <= names


# ---- whole phases of a run in a mode


def check_phases(folder: Path, mode: Callable[[], Any]) -> None:
    sizes = (2, 2, 2)
    with LOOP.sharded(sizes) as sharded:
        norms = train(sharded, 1)
        save(sharded, folder)
        norms += train(sharded, 2)
        expected = whole_values(sharded)

    def resumed(sharded: ShardedModel) -> None:
        with mode():
            load(sharded, folder)
        assert train(sharded, 2) == norms[1:]

    def built_in_the_mode() -> ShardedModel:
        model = build()
        with mode():
            return LOOP.sharded(sizes, model)

    def stepped(step: Callable[[ShardedModel], object]) -> ShardedModel:
        sharded = LOOP.sharded(sizes)
        for index in range(3):
            with mode():
                sharded.zero_grad()
            backward_all(losses_of(sharded.model))
            with mode():
                assert sharded.clip_grad_norm_(CLIP).item() == norms[index]
                step(sharded)
        return sharded

    with LOOP.sharded(sizes) as fresh:  # without a state that a load could write to
        resumed(fresh)
    with LOOP.sharded(sizes) as stale:
        train(stale, 1)
        resumed(stale)
    ends = [stepped(lambda s: s.step()), stepped(lambda s: s.optimizer.step())]
    if mode is torch.inference_mode:
        ends.append(built_in_the_mode())
        assert train(ends[-1], 3) == norms
    for sharded in ends:
        assert_same(sharded, expected, mode)
        train(sharded, 1)
        with mode():
            sharded.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_built_resumed_or_stepped_in_an_inference_mode_has_the_same_bits(
    tmp_path, mode
):
    run_ranks(check_phases, 2, tmp_path, mode)


def refuses_inference_models() -> None:
    with torch.inference_mode():
        model = build()
    assert_refused(
        lambda: shard(model, [], ShardSizes(2, 2, 2), new_adamw),
        r"^0\.weight was made in torch\.inference_mode.*build the model outside",
    )


def test_a_model_that_was_made_in_an_inference_mode_is_refused_by_name():
    run_ranks(refuses_inference_models, 2)
