# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that call `shard` with something else, or change settings alone, end in one line."""

import os
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp import ConfigurationError, ScheduleConfig, ShardSizes, shard
from megatron_asynchzp.engine.comm.order_check import OrderMismatch
from scripts.testbed.ranks import run_ranks
from tests.support.engine import build_toy
from tests.support.toy_models import toy_batch, toy_loss

AdamW = torch.optim.AdamW


def by_bias(named: list, decay: float = 0.1) -> AdamW:
    biases = [pair for pair in named if "bias" in pair[0]]
    rest = [pair for pair in named if "bias" not in pair[0]]
    return AdamW([{"params": rest}, {"params": biases, "weight_decay": decay}], lr=1e-2)


# What the last of 3 ranks is called with, and the message up to who has which.
LAST: dict[str, tuple[dict[str, Any], str]] = {
    "sizes": ({"sizes": ShardSizes(1, 1, 3)}, "sizes is ShardSizes(param=3, grad=3, optim=3, "),
    "a depth": ({"schedule": ScheduleConfig(prefetch_depth=2)}, "schedule.prefetch_depth is 1"),
    "a dtype": ({"param_dtype": torch.bfloat16}, "param_dtype is None"),
    "a cast": ({"cast_forward_inputs": False}, "cast_forward_inputs is True"),
    "an order of units": ({"units": lambda model: [*model.blocks][::-1]}, "units[0] is blocks.0"),
    "fewer units": ({"units": lambda model: [*model.blocks][:-1]}, "units[2] is blocks.2"),
    "a rate": ({"optimizer": partial(AdamW, lr=2e-2)}, "lr of the optimizer's group 0 is 0.01"),
    "a tensor": ({"optimizer": partial(AdamW, lr=torch.tensor(1e-2))}, "lr of the optimizer's"),
    "a class": ({"optimizer": partial(torch.optim.Adam, lr=1e-2)}, "optimizer is AdamW"),
    "groups": ({"optimizer": by_bias}, "the optimizer's group of blocks.0.norm.bias is 0"),
    "one fewer of them": (
        {"optimizer": lambda named: AdamW(named[1:], lr=1e-2)},
        "the optimizer's group of embedding.weight is 0",
    ),
    "a variable": ({"env": {"NVTE_FUSED_ATTN": "0"}}, "NVTE_FUSED_ATTN is not given"),
}


def message_of(changes: dict[str, Any]) -> str:
    """What `shard` raises where the last rank calls it with `changes`."""
    own = changes if dist.get_rank() == dist.get_world_size() - 1 else {}
    model = build_toy()
    units = own.get("units", lambda model: [*model.blocks])(model)
    call: dict[str, Any] = {"sizes": ShardSizes(3, 3, 3), "optimizer": partial(AdamW, lr=1e-2)}
    call |= {name: value for name, value in own.items() if name not in ("units", "env")}
    with mock.patch.dict(os.environ, own.get("env", {})):
        try:
            shard(model, units, **call).close()
        except ConfigurationError as error:
            return str(error)
    return ""


def change(name: str, groups: list[dict[str, Any]]) -> float:
    """What is changed; returns what gradients are clipped to from now on."""
    if name == "a scheduler":
        groups[0]["lr"] *= 0.9
    elif name == "a decay":
        groups[1]["weight_decay"] = 0.3
    elif name == "a new setting":
        groups[1]["swa_lr"] = 0.1
    elif name == "a clip":
        return 0.5
    elif name == "betas":
        groups[0]["betas"] = (0.9, 0.95)
    return 1.0


CHANGED = {
    "a scheduler": "step 3: lr of the optimizer's group 0 is 0.01 on ranks 0, 1 and 0.009",
    "a decay": "step 3: weight_decay of the optimizer's group 1 is 0.1 on ranks 0, 1 and 0.3",
    "a new setting": "step 3: an optimizer's setting is 'nothing' on ranks 0, 1 and 'swa_lr",
    "betas": "step 3: betas of the optimizer's group 0 is [0.9, 0.999] on ranks 0, 1",
    "a clip": "step 4: max_norm of clip_grad_norm_ is 1.0 on ranks 0, 1 and 0.5 on rank 2",
    "nothing": "",
}


def message_of_change(name: str, sizes: ShardSizes) -> str:
    """What ends a training in which the last rank changes a setting after the second step."""
    sharded, max_norm = shard(build_toy(), None, sizes, by_bias), 1.0
    try:
        for step in range(4):
            sharded.zero_grad()
            toy_loss(sharded.model, toy_batch(step, 0, dist.get_rank())).backward()
            sharded.clip_grad_norm_(max_norm)
            sharded.step()
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                max_norm = change(name, sharded.optimizer.param_groups)
        sharded.close()
    except OrderMismatch as error:
        sharded.runtime.driver._is_closed.set()
        return str(error)
    return ""


def messages_of_changes() -> dict[str, str]:
    sizes = dict(zip(CHANGED, [ShardSizes(1, 1, 3), ShardSizes(3, 3, 3)] * 3))
    return {name: message_of_change(name, sizes[name]) for name in CHANGED}


@pytest.mark.habit(
    "other settings of the optimizer or another `max_norm` on some ranks (a scheduler of one)"
)
def test_settings_of_the_optimizer_that_change_on_one_rank_alone_end_the_next_step():
    first, *others = run_ranks(messages_of_changes, 3)
    assert others == [first, first]
    for name, begin in CHANGED.items():
        assert first[name].startswith(begin) and bool(first[name]) == bool(begin), first[name]


def messages_of_all() -> dict[str, str]:
    """Of each difference, and of none."""
    found = {name: message_of(changes) for name, (changes, _) in LAST.items()}
    return found | {"nothing": message_of({})}


@pytest.mark.habit(
    "ranks that call `shard` with other `sizes`, `units`, `schedule`, `param_dtype` or optimizer",
    "other variables that change numbers (`NVTE_*`, `NCCL_ALGO`, ...) on some ranks",
)
def test_ranks_that_call_shard_with_something_else_are_named_with_both_values():
    first, *others = run_ranks(messages_of_all, 3)
    assert others == [first, first]
    for name, (_, begin) in LAST.items():
        assert first[name].startswith(begin), first[name]
        assert " on ranks 0, 1 and " in first[name] and " on rank 2" in first[name]
        assert first[name].endswith(
            "; call shard with the same arguments on every rank of the group"
        )
    assert first["nothing"] == ""
