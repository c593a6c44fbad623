# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A loop around `shard` has the same bits with units sent before the update, whatever it does to
gradients, parameters and settings in between.
"""

from collections.abc import Callable

import pytest
import torch

from megatron_asynchzp import ScheduleConfig, ShardedModel, ShardSizes, shard
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.ranks import run_ranks
from tests.support.engine import build_toy
from tests.support.toy_models import toy_batch, toy_loss

Disturb = Callable[[ShardedModel, int], None]


def nothing(sharded: ShardedModel, step: int) -> None:
    """The usual step, without clipping."""


def clip_never(sharded: ShardedModel, step: int) -> None:
    sharded.clip_grad_norm_(1e6)


def clip_now_and_then(sharded: ShardedModel, step: int) -> None:
    sharded.clip_grad_norm_(1e-3 if step % 2 else 1e6)


def clip_twice(sharded: ShardedModel, step: int) -> None:
    sharded.clip_grad_norm_(1e-3)
    sharded.clip_grad_norm_(1e6)


def write_grads(sharded: ShardedModel, step: int) -> None:
    for group in sharded.optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.clamp_(-1e-4, 1e-4)


def replace_grads(sharded: ShardedModel, step: int) -> None:
    sharded.clip_grad_norm_(1e6)
    for group in sharded.optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param) * 1e-3


def write_after_clipping(sharded: ShardedModel, step: int) -> None:
    sharded.clip_grad_norm_(1e6)
    write_grads(sharded, step)


def write_params(sharded: ShardedModel, step: int) -> None:
    with sharded.changing_params(), torch.no_grad():
        for group in sharded.optimizer.param_groups:
            for param in group["params"]:
                param.mul_(0.999)


def change_rate(sharded: ShardedModel, step: int) -> None:
    sharded.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + step)


def evaluate(sharded: ShardedModel, step: int) -> None:
    with torch.no_grad():
        toy_loss(sharded.model, toy_batch(step, 5, 0))


def save(sharded: ShardedModel, step: int) -> None:
    sharded.clip_grad_norm_(1e6)
    sharded.runtime.settle()  # as state_dict() begins


def hook(sharded: ShardedModel, step: int) -> None:
    if step == 1:
        sharded.optimizer.register_step_pre_hook(lambda *_: write_grads(sharded, step))


WAYS = [nothing, clip_never, clip_now_and_then, clip_twice, write_grads, replace_grads]
WAYS += [write_after_clipping, write_params, change_rate, evaluate, save, hook]
FAST_WAYS = [write_params, hook]


def train(
    disturb: Disturb, early: str, dtype: torch.dtype, optimizer: type[torch.optim.Optimizer]
) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, what is held at the end, and how many units were sent early."""
    model = build_toy(dtype, depth=4)
    schedule = ScheduleConfig(early_update=early)
    sharded = shard(
        model,
        model.blocks,
        ShardSizes(2, 2, 4),
        lambda params: optimizer(params, lr=1e-2, weight_decay=0.1),
        schedule=schedule,
    )
    sent, losses = 0, []
    for step in range(4):
        sharded.zero_grad()
        for index in range(2):
            # In step 3 the loop does not say which is the last.
            sharded.set_is_last_micro_batch(index == 1 or step == 3)
            loss = toy_loss(model, toy_batch(step, index, 0))
            loss.backward()
            losses.append(loss.item())
        sent += sum(map(sharded.runtime.gathers.was_sent, sharded.runtime.units))
        disturb(sharded, step)
        if step != 1 or disturb is hook:
            sharded.step()  # step 1 is left out
    held = [value for _, whole in sharded.full_params() for value in [whole.clone()]]
    for state in sharded.optimizer.state.values():
        held += [value.clone() for value in state.values() if isinstance(value, torch.Tensor)]
    sharded.close()
    return losses, held, sent


def check(
    ways: list[Disturb], dtypes: list[torch.dtype], optimizer: type[torch.optim.Optimizer]
) -> None:
    for dtype in dtypes:
        for disturb in ways:
            losses, held, none = train(disturb, "off", dtype, optimizer)
            found, others, sent = train(disturb, "on", dtype, optimizer)
            name = (disturb.__name__, dtype)
            assert sent and not none, name
            assert found == losses, name
            for one, other in zip(held, others, strict=True):
                assert torch.equal(one, other), name


def test_whatever_a_loop_does_before_the_update_the_bits_are_those_without_early_updates():
    run_ranks(check, 4, FAST_WAYS, [torch.float32], torch.optim.AdamW)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_early_updates_have_the_same_bits_in_every_dtype_and_with_every_optimizer(optimizer):
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    run_ranks(check, 4, WAYS, dtypes, optimizer, timeout_s=900.0)


class OwnAdam(torch.optim.AdamW):
    """Of which nobody knows what it does."""


def refuse() -> str:
    model = build_toy()
    with pytest.raises(ConfigurationError) as found:
        shard(
            model,
            model.blocks,
            ShardSizes(1, 1, 1),
            lambda params: OwnAdam(params, lr=1e-2),
            schedule=ScheduleConfig(early_update="on"),
        )
    return str(found.value)


def test_an_optimizer_of_which_nobody_knows_what_it_does_is_late_and_refused_where_it_is_on():
    (line,) = run_ranks(refuse, 1)
    assert "OwnAdam" in line and "\n" not in line and "AdamW" in line
