# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a loop does to gradients, states, settings and parameters of a sharded model's optimizer by
ways that nothing counts: a step has the values of one process, or ends in one line."""

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ConfigurationError, ScheduleConfig, ShardedModel, ShardSizes, shard
from megatron_asynchzp.engine.comm.collectives import Steps, completed
from megatron_asynchzp.engine.failure.last_line import CollectiveFailure
from megatron_asynchzp.engine.zero import unit as unit_module
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.ranks import run_ranks
from tests.device.conftest import worlds as worlds
from tests.device.programs import device_of_rank
from tests.support.selection import slow_unless

STEPS, RATE = 4, 0.05
Optimizer = torch.optim.Optimizer
Sizes = tuple[int, int, int]


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def grads_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param.grad for param in params_of(optimizer) if param.grad is not None]


# ---- between backward and step


def clamp_data(optimizer: Optimizer, step: int) -> None:
    for grad in grads_of(optimizer):
        grad.data.clamp_(-1e-3, 1e-3)


def write_numpy(optimizer: Optimizer, step: int) -> None:
    for grad in grads_of(optimizer):
        if grad.device.type == "cpu":
            grad.numpy()[:] *= 0.5
        else:
            grad.data.mul_(0.5)


def write_dlpack(optimizer: Optimizer, step: int) -> None:
    for grad in grads_of(optimizer):
        if grad.numel():
            torch.from_dlpack(grad.detach()).mul_(0.5)


_kept: list[torch.Tensor] = []


def write_kept_aliases(optimizer: Optimizer, step: int) -> None:
    if step == 0:
        _kept[:] = [grad.data.view(-1) for grad in grads_of(optimizer)]
    # The gradients of a plain model may be other tensors by now.
    current = grads_of(optimizer)
    for alias, grad in zip(_kept, current, strict=True):
        same = alias.numel() == 0 or alias.data_ptr() == grad.data_ptr()
        (alias if same else grad.data).mul_(0.25)


def sign(optimizer: Optimizer, step: int) -> None:
    for grad in grads_of(optimizer):
        grad.data.neg_()


def clear_states(optimizer: Optimizer, step: int) -> None:
    optimizer.state.clear()


def reset_states(optimizer: Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data.zero_()


def load_states(optimizer: Optimizer, step: int) -> None:
    state = optimizer.state_dict()
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"] * 0.5
    optimizer.load_state_dict(state)


def change_last_group(optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[-1]["lr"] = RATE * (2 + step)


def change_betas(optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[-1]["betas"] = (0.5, 0.5 + 0.1 * step)
    optimizer.param_groups[0]["weight_decay"] = 0.1 * step


def change_rate_in_place(optimizer: Optimizer, step: int) -> None:
    group = optimizer.param_groups[-1]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].mul_(2.0)
    else:
        group["lr"] = torch.tensor(RATE, device=group["params"][0].device)


def move_params(optimizer: Optimizer, step: int) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def take_params_out(optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups[0]["params"] = []


class Slower(torch.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.7
        return super().step(closure)


def change_class(optimizer: Optimizer, step: int) -> None:
    optimizer.__class__ = Slower


def rescale_in_hook(optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.register_step_pre_hook(lambda *_: clamp_data(optimizer, step))


def decay_by_hand(optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.mul_(1.0 - 0.1 * group["lr"])


def clamp_weights_openly(optimizer: Optimizer, step: int) -> None:
    with torch.no_grad():
        for param in params_of(optimizer):
            param.clamp_(-0.2, 0.2)


def return_to_first(optimizer: Optimizer, step: int) -> None:
    if step == 0:
        _kept[:] = [param.detach().clone() for param in params_of(optimizer)]
    elif step == 2:
        torch._foreach_copy_([param.data for param in params_of(optimizer)], _kept)


def assign_data(optimizer: Optimizer, step: int) -> None:
    for param in params_of(optimizer):
        param.data = param.data * 0.9
        if param.grad is not None:
            param.grad.data = param.grad.data * 0.5


BEFORE = [
    assign_data,
    decay_by_hand,
    clamp_weights_openly,
    return_to_first,
    clamp_data,
    write_numpy,
    write_dlpack,
    write_kept_aliases,
    sign,
    clear_states,
]
BEFORE += [reset_states, load_states, change_last_group, change_betas, change_rate_in_place]
BEFORE += [move_params, take_params_out, change_class, rescale_in_hook]

Change = Callable[[Optimizer, int], None]


def new_model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(device)


def new_optimizer(named: object) -> Optimizer:
    pairs = list(named)  # pyright: ignore
    groups = [{"params": [p for name, p in pairs if int(name[0]) < 2]}]
    groups += [{"params": [p for name, p in pairs if int(name[0]) >= 2], "lr": RATE / 2}]
    return torch.optim.AdamW(groups, lr=RATE)


def inputs_of(step: int, rank: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 1, 16).view(2, 8).add(0.1 * (rank + step)).to(device)


Clips = list[list[float]]
"""Of the steps in turn: the norms to which each is clipped, one after another, before anything is
changed."""
# A unit that was sent early is sent again where a norm above the limit changes its gradients.
CLIPS: list[Clips] = [[[1e6]], [[1e6], [1e-3]], [[1e-3, 1e6]]]
NEVER: Clips = [[]]


def nothing(optimizer: Optimizer, step: int) -> None:
    """The usual step."""


def one_process(change: Change, clips: Clips) -> list[torch.Tensor]:
    """The parameters after the last step."""
    device, world = device_of_rank(), dist.get_world_size()
    model = new_model(device)
    optimizer = new_optimizer(model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for rank in range(world):
            (model(inputs_of(step, rank, device)).pow(2).mean() / world).backward()
        for limit in clips[step % len(clips)]:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        change(optimizer, step)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def trained(change: Change, sizes: Sizes, early: str, clips: Clips) -> list[torch.Tensor]:
    device = device_of_rank()
    model = new_model(device)
    schedule = ScheduleConfig(early_update=early)
    made = shard(model, list(model), ShardSizes(*sizes), new_optimizer, schedule=schedule)
    sent = 0
    with made:
        for step in range(STEPS):
            made.zero_grad()
            model(inputs_of(step, dist.get_rank(), device)).pow(2).mean().backward()
            sent += len(made.runtime.early_sends.units)
            for limit in clips[step % len(clips)]:
                made.clip_grad_norm_(limit)
            change(made.optimizer, step)
            made.step()
        # With one holder of each shard nothing travels.
        assert bool(sent) is (early == "on" and sizes[2] > sizes[0])
        return [value.clone() for _, value in made.full_params()]


def compare(changes: list[Change], all_sizes: list[Sizes], all_clips: list[Clips] = CLIPS) -> None:
    cases = [(change, NEVER) for change in changes]
    cases += [(change, clips) for change in (nothing, clamp_data) for clips in all_clips]
    for (change, clips), sizes in product(cases, all_sizes):
        expected = one_process(change, clips)
        early, late = (trained(change, sizes, early, clips) for early in ("on", "off"))
        for one, other, plain in zip(early, late, expected, strict=True):
            assert torch.equal(one, other), (change.__name__, sizes)
            assert (one - plain).abs().max() <= 1e-6, (change.__name__, sizes)


FAST = [assign_data, decay_by_hand, clamp_data, load_states, change_last_group, take_params_out]
WORLDS = [(1, [(1, 1, 1)]), (2, [(2, 2, 2), (1, 1, 2)]), (4, [(1, 1, 1), (2, 2, 2), (2, 2, 4)])]


@pytest.mark.habit(
    "writing gradients by `.grad.data`, `.numpy()`, DLPack or a kept view, assigning `.grad.data`",
    "the optimizer's state cleared, reset or loaded between backward and `step()`",
    "settings, groups or class of the optimizer changed between backward and `step()`",
    "weights decayed by hand, clamped, assigned or put back between backward and `step()`",
)
@pytest.mark.parametrize(
    ("world_size", "changes", "all_sizes", "clips"),
    [
        slow_unless(True, 2, FAST, [(1, 2, 2)], CLIPS[1:2], id="some"),
        *(
            slow_unless(False, size, BEFORE, some, CLIPS, id=f"{size} ranks")
            for size, some in WORLDS
        ),
    ],
)
def test_what_is_changed_between_backward_and_step_counts_by_whatever_way_it_is_changed(
    world_size: int, changes: list[Change], all_sizes: list[Sizes], clips: list[Clips]
):
    run_ranks(compare, world_size, changes, all_sizes, clips, timeout_s=900.0)


@pytest.mark.slow
def test_so_it_does_on_a_device_where_the_host_runs_ahead(worlds: DeviceWorlds):
    # A loop may write what a preview still reads: what comes of that differs, and is sent again.
    worlds.run(compare, 2, BEFORE, [(2, 2, 2), (1, 1, 2)], timeout_s=600, watches=False)


def one_rank_alone(sizes: Sizes) -> None:
    def change(optimizer: Optimizer, step: int) -> None:
        # The replicas would go apart, were all of them not equal: gradients are of all ranks.
        if dist.get_rank() == 1:
            clamp_data(optimizer, step)

    for one, other in zip(
        *(trained(change, sizes, early, NEVER) for early in ("on", "off")), strict=True
    ):
        assert torch.equal(one, other)


def test_what_one_rank_alone_changes_all_send_again():
    run_ranks(one_rank_alone, 2, (1, 2, 2))


def read_until_the_step(dtype: torch.dtype | None, sizes: Sizes) -> None:
    """Each update travels for so long that who reads meanwhile would see it."""
    gather = unit_module.all_gather_steps

    def gather_slowly(*args: Any) -> Steps:
        time.sleep(0.02)
        last = yield from completed(gather(*args))
        time.sleep(0.02)
        return last

    model = new_model(torch.device("cpu"))
    schedule = ScheduleConfig(early_update="on")
    made = shard(
        model, list(model), ShardSizes(*sizes), new_optimizer, param_dtype=dtype, schedule=schedule
    )
    optimizer, reads = made.optimizer, 0

    def values_now() -> list[torch.Tensor]:
        return [param.detach().clone() for param in params_of(optimizer)]

    def read(*_: object) -> None:
        nonlocal reads
        reads += 1
        assert all(map(torch.equal, values_now(), values))

    with made, patch.object(unit_module, "all_gather_steps", gather_slowly):
        for layer in model:
            layer.register_full_backward_hook(read)
        for step in range(2):
            made.zero_grad()
            values = values_now()
            model(inputs_of(step, dist.get_rank(), torch.device("cpu"))).sum().backward()
            until = time.monotonic() + 0.2
            while time.monotonic() < until or reads <= 8:
                read()
            made.step()
            changed = [not torch.equal(*both) for both in zip(values_now(), values, strict=True)]
            assert any(changed)


@pytest.mark.habit("weights of the optimizer read in hooks of backward and before `step()`")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(1, 1, 2), slow_unless(False, (1, 2, 2), id="(1, 2, 2)")])
def test_until_the_step_the_optimizer_s_values_are_those_of_the_last_one(
    dtype: torch.dtype | None, sizes: Sizes
):
    run_ranks(read_until_the_step, 2, dtype, sizes)


class OwnAdam(torch.optim.AdamW):
    """Of which nobody knows what it does."""


def refuse() -> str:
    model = new_model(torch.device("cpu"))
    with pytest.raises(ConfigurationError) as found:
        shard(
            model,
            list(model),
            ShardSizes(1, 1, 1),
            lambda params: OwnAdam(params, lr=1e-2),
            schedule=ScheduleConfig(early_update="on"),
        )
    return str(found.value)


def test_an_optimizer_of_which_nobody_knows_what_it_does_is_late_and_refused_where_it_is_on():
    (line,) = run_ranks(refuse, 1)
    assert "OwnAdam" in line and "\n" not in line and "AdamW" in line


# ---- after the step


def clamp_params(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        param.data.clamp_(-0.05, 0.05)


def clamp_openly(optimizer: Optimizer) -> None:
    with torch.no_grad():
        for param in params_of(optimizer):
            param.clamp_(-0.05, 0.05)


def write_to_views(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        param.detach().view(-1)[:1].mul_(2.0)


def swap_by_assignment(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        param.data = param.data.flip(0)


def average(optimizer: Optimizer) -> None:
    slow = [torch.zeros_like(param) for param in params_of(optimizer)]
    torch._foreach_lerp_([param.data for param in params_of(optimizer)], slow, 0.5)


AFTER = [clamp_params, clamp_openly, write_to_views, swap_by_assignment, average]


def evaluate(made: ShardedModel, inputs: torch.Tensor) -> None:
    with torch.no_grad():
        made.model(inputs)


def train_on(made: ShardedModel, inputs: torch.Tensor) -> None:
    made.zero_grad()
    made.model(inputs).pow(2).mean().backward()


def take_whole(made: ShardedModel, inputs: torch.Tensor) -> None:
    for _ in made.full_params():
        pass


USES = [evaluate, train_on, take_whole]


def write_after(sizes: Sizes, dtype: torch.dtype | None, pairs: list[tuple]) -> None:
    device = device_of_rank()
    inputs = inputs_of(0, dist.get_rank(), device)
    for write, use in pairs:
        model = new_model(device)
        made = shard(
            model,
            list(model),
            ShardSizes(*sizes),
            new_optimizer,
            param_dtype=dtype,
            schedule=ScheduleConfig(time_limit_s=5.0),
        )
        for _ in range(2):
            train_on(made, inputs)
            made.step()
        with made.changing_params():
            average(made.optimizer)
        values = [param.detach().clone() for param in params_of(made.optimizer)]
        use(made, inputs)
        assert all(map(torch.equal, params_of(made.optimizer), values))
        write(made.optimizer)
        with pytest.raises((ConfigurationError, CollectiveFailure)) as found:
            for _ in range(3):  # a rank that owns nothing is told
                use(made, inputs)
        lines: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(lines, str(found.value))
        assert "changing_params()" in lines[0] and not any("\n" in line for line in lines), lines
        with suppress(ConfigurationError, CollectiveFailure):
            made.close()


def write_alone() -> None:
    """A model of one rank."""
    model = new_model(device_of_rank())
    made = shard(model, list(model), ShardSizes(1, 1, 1), new_optimizer)
    for write in AFTER:
        write(made.optimizer)
        values = [param.detach().clone() for param in params_of(made.optimizer)]
        found = [value.flatten() for _, value in made.full_params()]
        assert all(map(torch.equal, found, values))
    for param in params_of(made.optimizer):
        with pytest.raises(ConfigurationError, match="keeps its shape, dtype and device"):
            param.data = param.data.half()
    made.close()


@pytest.mark.habit("weights clamped, swapped or averaged after `step()`")
@pytest.mark.parametrize(
    ("world_size", "sizes", "dtype"),
    [
        slow_unless(True, 2, (1, 1, 2), None, id="fp32"),
        slow_unless(False, 2, (1, 2, 2), torch.bfloat16, id="bf16"),
        slow_unless(False, 2, (2, 2, 2), None, id="(2, 2, 2)"),
        slow_unless(False, 4, (2, 2, 4), None, id="(2, 2, 4)"),
        slow_unless(False, 4, (1, 1, 1), None, id="(1, 1, 1)"),
    ],
)
def test_values_that_are_written_after_the_step_are_refused_at_their_next_use(
    world_size: int, sizes: Sizes, dtype: torch.dtype | None
):
    pairs = list(zip(AFTER, [*USES, *USES]))
    run_ranks(write_after, world_size, sizes, dtype, pairs, timeout_s=300.0)


def test_a_rank_alone_may_write_what_its_model_computes_with():
    run_ranks(write_alone, 1)


def halve(weight: torch.Tensor) -> None:
    weight.data.mul_(0.5)


def ends_on_a_device(sizes: Sizes, in_forward: bool) -> str:
    """The host runs ahead: the line comes in the next step. (The write itself is not ordered with
    what is on its way.)"""
    device = device_of_rank()
    model = new_model(device)
    made = shard(model, list(model), ShardSizes(*sizes), new_optimizer)
    if in_forward:
        model[1].register_forward_pre_hook(lambda layer, _: halve(layer.weight))
    with pytest.raises((ConfigurationError, CollectiveFailure)) as found:
        for _ in range(4):
            made.zero_grad()
            model(inputs_of(0, dist.get_rank(), device)).pow(2).mean().backward()
            made.step()
            if not in_forward:
                clamp_params(made.optimizer)
    return str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 2, 2)])
def test_on_a_device_such_a_run_ends_in_the_next_step(worlds: DeviceWorlds, sizes: Sizes):
    for text, in_forward in (("changing_params()", False), ("1: its parameters were wri", True)):
        lines = worlds.run(ends_on_a_device, 2, sizes, in_forward, watches=False)
        # A rank may be told before it finds out by itself.
        assert any(text in line for line in lines) and not any("\n" in line for line in lines)
