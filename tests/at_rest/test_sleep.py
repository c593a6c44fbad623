# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A sharded model that sleeps between two steps goes on with the same bits, answers a checkpoint,
and refuses everything else in one line."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from megatron_asynchzp import ConfigurationError, ShardedModel, ShardSizes, shard
from megatron_asynchzp.engine.at_rest.host_copy import NUM_COPIES, HostCopy
from megatron_asynchzp.engine.device import CpuDevice
from scripts.testbed.ranks import run_ranks
from tests.support.engine import build_toy
from tests.support.selection import slow_unless
from tests.support.toy_models import toy_batch, toy_loss

FP32, BF16 = torch.float32, torch.bfloat16
NO_SLEEP: dict[int, int] = {}
LEVELS = {1: 1, 2: 2, 3: 2, 5: 1}  # after so many steps


def new_sharded(sizes: Sequence[int], dtype: torch.dtype) -> ShardedModel:
    model = build_toy(dtype)
    return shard(
        model, model.blocks, ShardSizes(*sizes), lambda params: torch.optim.AdamW(params, lr=1e-2)
    )


def train_step(sharded: ShardedModel, step: int) -> float:
    sharded.zero_grad()
    loss = toy_loss(sharded.model, toy_batch(step, 0, torch.distributed.get_rank()))
    loss.backward()
    sharded.clip_grad_norm_(0.5)
    sharded.step()
    return loss.item()


def train(sizes: Sequence[int], dtype: torch.dtype, sleeps: dict[int, int]) -> tuple:
    """Losses, and all weights at the end."""
    sharded, losses = new_sharded(sizes, dtype), []
    for step in range(6):
        losses.append(train_step(sharded, step))
        if step in sleeps:
            sharded.sleep(sleeps[step])
            sharded.wake()
        if step % 2:
            with torch.no_grad():
                losses.append(toy_loss(sharded.model, toy_batch(step, 1, 0)).item())
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
    sharded = new_sharded((1, 2, 2), BF16)
    train_step(sharded, 0)
    checkpoint.save(sharded.state_dict(), checkpoint_id=awake)
    sharded.sleep(2)
    checkpoint.save(sharded.state_dict(), checkpoint_id=asleep)
    sharded.wake()
    expected = [train_step(sharded, 1), train_step(sharded, 2)]
    sharded.close()
    for saved in (awake, asleep):
        other = new_sharded((2, 2, 2), BF16)
        state = other.state_dict()
        checkpoint.load(state, checkpoint_id=saved)
        other.load_state_dict(state)
        assert [train_step(other, 1), train_step(other, 2)] == expected
        other.close()
    return True


def test_a_checkpoint_that_is_saved_asleep_is_the_one_that_is_saved_awake(tmp_path):
    assert all(run_ranks(save_asleep, 2, tmp_path))


def refuse_all() -> list[str]:
    sharded = new_sharded((2, 2, 2), BF16)
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
    train_step(sharded, 1)
    sharded.close()
    return said


def test_what_needs_the_states_is_refused_while_it_sleeps_and_so_is_a_sleep_within_a_step():
    within, asleep = "sleep() within a step is not allowed", "the sharded model is asleep"
    first = ["wake() without a sleep()", "sleep(3)", within, within, within]
    each = [*[asleep] * 11, "the state is not one of this object as it is now"]
    assert run_ranks(refuse_all, 2) == [[*first, *each, *each]] * 2


def sleep_first() -> list[bool]:
    """Before the first step, and after one that a GradScaler left out."""
    sharded, fresh = new_sharded((1, 2, 2), BF16), new_sharded((1, 2, 2), BF16)
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
    losses = [train_step(one, 1) for one in (sharded, fresh)]
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
