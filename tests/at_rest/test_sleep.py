# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A sharded model that sleeps between two steps goes on with the same bits, answers a checkpoint,
and refuses everything else in one line."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_asynchzp import ConfigurationError
from megatron_asynchzp.engine.at_rest.sleep import NUM_COPIES, HostCopy
from megatron_asynchzp.engine.device import CpuDevice
from scripts.testbed.ranks import run_ranks
from tests.support.engine import build_toy
from tests.support.loops import Loop, load, save
from tests.support.selection import slow_unless
from tests.support.toy_models import toy_batch, toy_loss

FP32, BF16 = torch.float32, torch.bfloat16
NO_SLEEP: dict[int, int] = {}
LEVELS = {1: 1, 2: 2, 3: 2, 5: 1}  # after so many steps


LOOP = Loop(partial(build_toy, BF16))


def train(sizes: Sequence[int], dtype: torch.dtype, sleeps: dict[int, int]) -> tuple:
    """Losses, and all weights at the end."""
    loop, losses = Loop(partial(build_toy, dtype)), []
    sharded = loop.sharded(sizes)
    for step in range(6):
        losses += loop.train(sharded, [step])
        if step in sleeps:
            sharded.sleep(sleeps[step])
            sharded.wake()
        if step % 2:
            with torch.no_grad():
                losses.append((toy_loss(sharded.model, toy_batch(step, 1, 0)).item(), 0.0))
    weights = {name: value.tolist() for name, value in sharded.full_params()}
    sharded.close()
    return losses, weights


def compare_with_no_sleep(sizes: Sequence[int], dtype: torch.dtype) -> bool:
    return train(sizes, dtype, LEVELS) == train(sizes, dtype, NO_SLEEP)


@pytest.mark.parametrize(
    "sizes, dtype",
    [
        ((2, 2, 2), FP32),
        ((2, 1, 2), BF16),
        slow_unless(False, (1, 2, 2), BF16),
        slow_unless(False, (1, 1, 1), FP32),
    ],
)
def test_training_goes_on_with_the_same_bits(sizes, dtype):
    assert all(run_ranks(compare_with_no_sleep, 2, sizes, dtype))


def save_asleep(folder: Path) -> bool:
    awake, asleep = folder / "awake", folder / "asleep"
    sharded = LOOP.sharded((1, 2, 2))
    LOOP.train(sharded, [0])
    save(sharded, awake)
    sharded.sleep(2)
    save(sharded, asleep)
    sharded.wake()
    expected = LOOP.train(sharded, (1, 2))
    sharded.close()
    for saved in (awake, asleep):
        other = LOOP.sharded((2, 2, 2))
        load(other, saved)
        assert LOOP.train(other, (1, 2)) == expected
        other.close()
    return True


def test_a_checkpoint_that_is_saved_asleep_is_the_one_that_is_saved_awake(tmp_path):
    assert all(run_ranks(save_asleep, 2, tmp_path))


def refuse_all() -> list[str]:
    sharded = LOOP.sharded((2, 2, 2))
    said: list[str] = []

    def refused(action) -> None:
        try:
            action()
            said.append("nothing")
        except ConfigurationError as error:
            said.append(str(error).partition(":")[0].partition(".")[0])

    tokens = toy_batch(0, 0, 0)
    refused(sharded.wake)
    refused(lambda: sharded.sleep(3))
    loss = toy_loss(sharded.model, tokens)
    refused(sharded.sleep)
    loss.backward()
    refused(sharded.sleep)
    sharded.step()
    sharded.zero_grad()
    with torch.no_grad():
        toy_loss(sharded.model, tokens)
    loss = toy_loss(sharded.model, tokens)
    refused(sharded.sleep)
    loss.backward()
    sharded.step()
    for level in (1, 2):
        sharded.sleep(level)
        actions = [
            lambda: sharded.sleep(2),
            lambda: sharded.model(tokens[:, :-1]),
            sharded.zero_grad,
            sharded.step,
            lambda: sharded.clip_grad_norm_(1.0),
            lambda: list(sharded.full_params()),
            lambda: sharded.load_full_params({}),
            lambda: sharded.load_state_dict({}),
            lambda: sharded.changing_params().__enter__(),
            lambda: sharded.optimizer.load_state_dict(sharded.optimizer.state_dict()),
            sharded.model.state_dict,
        ]
        for action in actions:
            refused(action)
        meanwhile = sharded.state_dict()
        sharded.wake()
        refused(lambda state=meanwhile: sharded.load_state_dict(state))
    LOOP.train(sharded, [1])
    sharded.close()
    return said


def test_what_needs_the_states_is_refused_while_it_sleeps_and_so_is_a_sleep_within_a_step():
    within, asleep = "sleep() within a step is not allowed", "the sharded model is asleep"
    first = ["wake() without a sleep()", "sleep(3)", within, within, within]
    each = [*[asleep] * 11, "the state is from before the last sleep() or wake()"]
    assert run_ranks(refuse_all, 2) == [[*first, *each, *each]] * 2


def sleep_first() -> list[bool]:
    """Before the first step, and after one that a GradScaler left out."""
    sharded, fresh = LOOP.sharded((1, 2, 2)), LOOP.sharded((1, 2, 2))
    sharded.sleep(2)
    asleep = set(sharded.state_dict())
    sharded.wake()
    found = [asleep == set(sharded.state_dict()) == set(fresh.state_dict())]
    scaler = torch.amp.GradScaler("cpu")
    loss = toy_loss(sharded.model, toy_batch(0, 0, 0)) * float("inf")
    scaler.scale(loss).backward()
    scaler.step(sharded.optimizer)
    scaler.update()
    sharded.sleep(2)
    sharded.wake()
    losses = [LOOP.train(each, [1]) for each in (sharded, fresh)]
    found.append(losses[0] == losses[1])
    sharded.close()
    fresh.close()
    return found


def test_it_may_sleep_before_the_first_step_and_after_one_that_was_left_out():
    assert run_ranks(sleep_first, 2) == [[True, True]] * 2


class CountsCopies(CpuDevice):
    def __init__(self):
        self.nbytes: list[int] = []

    def new_host_memory(self, shape, dtype):
        self.nbytes.append(shape[0])
        return super().new_host_memory(shape, dtype)


@pytest.mark.parametrize("numels", [[3], [5, 1000, 7], [1] * 100, [4096] * 33, [0, 9], []])
def test_any_tensors_are_at_most_ten_copies_and_come_back_with_their_bits(numels):
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    tensors = [
        torch.randn(numel).to(dtypes[index % 3]).requires_grad_(False)
        for index, numel in enumerate(numels)
    ]
    views = [tensor[1:] for tensor in tensors]
    kept = torch.randn(3)
    expected = [tensor.clone() for tensor in tensors]
    device = CountsCopies()
    copy = HostCopy([*tensors, *views, kept], [kept[1:]], device, 10.0)
    assert len(device.nbytes) <= NUM_COPIES
    left_nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert left_nbytes == 0
    assert id(copy.value_of(kept)) == id(kept)
    # pytest must not print what has no memory.
    differing = [
        index
        for index, (tensor, view, value) in enumerate(zip(tensors, views, expected, strict=True))
        if not torch.equal(copy.value_of(tensor), value)
        or not torch.equal(copy.value_of(view), value[1:])
    ]
    assert differing == []
    copy.restore()
    for tensor, view, value in zip(tensors, views, expected, strict=True):
        assert torch.equal(tensor, value) and torch.equal(view, value[1:])
