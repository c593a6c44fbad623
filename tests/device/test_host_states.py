# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on the host change no bit under delays either, in accesses that are ordered, and
take on the device what the formula says."""

import gc
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardedModel, ShardSizes, shard
from megatron_asynchzp.engine.sharding.in_flight import room_nbytes
from megatron_asynchzp.engine.sharding.value_hash import forget_weights
from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.ranks import run_ranks
from tests.device.programs import CLIP, device_of_rank, is_emulated, new_adamw, new_toy
from tests.support.selection import slow_unless
from tests.support.toy_models import toy_batch, toy_loss

EACH_LAW = [Delays(law, seed) for seed, law in enumerate(LAWS)]
FEW = [Delays("uniform", 1), Delays("on-demand")]


class EndsEarlyError(Exception):
    """Ends a forward in its middle."""


def train(
    sizes: Sequence[int], offload: float, rests: bool, dtype: torch.dtype = torch.bfloat16
) -> list[Any]:
    """Losses, norms, weights and states. rests: with all else that happens between two steps."""
    model = new_toy().to(dtype)
    seen: list[Any] = []
    with shard(model, model.blocks, ShardSizes(*sizes), new_adamw, offload=offload) as sharded:
        for step in range(4):
            seen += train_step(sharded, step)
            if rests and step == 1:
                states = sharded.state_dict()
                seen += [value.values.tolist() for key, value in states.items() if "exp_avg" in key]
                sharded.sleep(2)
                sharded.wake()
            if rests and step == 2:
                sharded.optimizer.load_state_dict(sharded.optimizer.state_dict())
                seen += [v.tolist() for _, v in sharded.stream_weights(dtype=torch.float32)]
        seen += [value.tolist() for _, value in sharded.full_params()]
        params = [part.param for part in sharded._trained if part.param.numel()]
        seen += [sharded.optimizer.state[one]["exp_avg_sq"].tolist() for one in params]
    return seen


def train_step(sharded: ShardedModel, step: int) -> list[torch.Tensor]:
    sharded.zero_grad()
    batches = [toy_batch(step, index, dist.get_rank()).to(device_of_rank()) for index in range(2)]
    loss = toy_loss(sharded.model, batches[0])
    loss.backward()
    with torch.no_grad():
        toy_loss(sharded.model, batches[1])
    norm = sharded.clip_grad_norm_(CLIP)

    def end(*_: object) -> None:
        raise EndsEarlyError

    hook = sharded.model.blocks[0].register_forward_pre_hook(end)
    with torch.no_grad(), suppress(EndsEarlyError):  # leaves gathers until the update comes
        toy_loss(sharded.model, batches[1])
    hook.remove()
    sharded.step()
    return [loss.detach().tolist(), norm.tolist()] if step % 2 else []


def train_each(cases: Sequence[Any], laws: Sequence[Delays]) -> list[list[Any]]:
    found = []
    for law in laws:
        if is_emulated():
            from scripts.testbed.device import inside

            inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        found.append([train(*case) for case in cases])
    return found


CASES = [((1, 2, 2), 1.0, False), ((2, 1, 2), 0.6, True), ((2, 2, 2), 0.0, False, torch.float32)]


@pytest.mark.parametrize(
    ("cases", "laws"),
    [
        slow_unless(True, CASES, FEW, id="few laws"),
        slow_unless(
            False, [*CASES, ((2, 2, 2), 1.0, True), ((1, 1, 1), 0.3, True)], EACH_LAW, id="each law"
        ),
    ],
)
def test_under_delays_no_bit_is_other_than_without_it_on_gloo(worlds: DeviceWorlds, cases, laws):
    without = [(sizes, 0.0, *others) for sizes, _, *others in cases]
    expected = run_ranks(train_each, 2, without, [Delays()])
    found = worlds.run(train_each, 2, cases, laws, timeout_s=60 * len(laws))
    for rank in range(2):
        for law, seen in zip(laws, found[rank], strict=True):
            assert seen == expected[rank][0], str(law)


class Wide(nn.Module):
    """Layers of unlike widths: units of unlike bytes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256 * n, bias=False) for n in (4, 2, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x)[..., :256] for layer in self.layers)


def bytes_by_fraction(fractions: Sequence[float]) -> list[tuple[list[int], list[int]]]:
    """What is allocated on the device after each step, and elements of the units on the host."""
    found = []
    for fraction in fractions:
        torch.manual_seed(0)
        gc.collect()
        forget_weights()
        before = torch.cuda.memory_allocated()
        model = Wide().to(device_of_rank(), torch.bfloat16)
        with shard(model, sizes=ShardSizes(1, 1, 2), optimizer=new_adamw, offload=fraction) as own:
            x = torch.ones(2, 256, device=device_of_rank(), dtype=torch.bfloat16)
            allocated = []
            for _ in range(3):
                own.zero_grad()
                model(x).square().mean().backward()
                own.step()
                own.runtime.settle()
                allocated.append(torch.cuda.memory_allocated() - before)
            away = [unit for unit in own.runtime.units if unit.is_on_host]
            found.append((allocated, [unit.optim_range.numel for unit in away]))
        del model, own, x, away
    return found


def test_on_the_device_it_takes_two_places_for_the_largest_unit_from_the_first_step_on(
    worlds: DeviceWorlds,
):
    states = 4 + 8  # bytes of an element: main parameter and moments
    for (without, _), *found in worlds.run(bytes_by_fraction, 2, (0.0, 0.1, 0.5, 1.0)):
        assert [len(numels) for _, numels in found] == [1, 2, 4]
        for allocated, numels in found:
            room = room_nbytes(states * numel for numel in numels)
            expected = without[0] + room - states * sum(numels)
            assert len(set(allocated)) == 1
            assert allocated[0] == pytest.approx(expected, rel=0.01)
