# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Computation goes on while a gather and a reduction are in flight: shown on a network that the
test holds shut meanwhile, so that no timing decides it."""

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp.engine.schedule import ScheduleConfig
from scripts.testbed.ranks import run_ranks
from tests.support.engine import build_toy, shard_model
from tests.support.held_network import HeldNetwork, replace_default_group
from tests.support.toy_models import ToyLM, toy_batch, toy_loss

# Long enough for a busy machine, and what a schedule that waits for the held network ends with.
LIMIT_S = 8.0


def toy_with_different_blocks() -> ToyLM:
    """So that the number of elements tells which unit a collective carries."""
    model = build_toy()
    for index, block in enumerate(model.blocks):
        inner = 80 + 64 * index
        block.up, block.down = nn.Linear(16, inner), nn.Linear(inner, 16)
    return model


def update(runtime) -> None:
    for unit in runtime.units:
        unit.main_param.storage.add_(unit.main_grad.view(unit.optim_range), alpha=-0.1)
    runtime.sync_params()


def compute_on_a_held_network() -> list[str]:
    """What had been computed while something was held, in order."""
    network, done = replace_default_group(), []
    torch.manual_seed(5)
    model = toy_with_different_blocks()
    schedule = ScheduleConfig("threaded", time_limit_s=LIMIT_S, checks_order=False)
    runtime = shard_model(model, (2, 2, 2), schedule)
    numels = {unit.name: unit.layout.padded_numel for unit in runtime.units}
    assert list(numels.values()).count(numels["blocks.2"]) == 1

    def step(index: int) -> torch.Tensor:
        runtime.zero_grads()
        return toy_loss(model, toy_batch(index, 0, dist.get_rank()))

    with runtime.no_sync():
        step(0).backward()  # records the order of uses
    runtime.sync_grads()
    hold(network, "all_gather", numels["blocks.2"])
    update(runtime)

    def forward_is_done(*_) -> None:
        assert network.await_held().kind == "all_gather"
        done.append("forward of blocks.1")
        network.open()

    def watch_backward(_module, _args, output: torch.Tensor) -> None:
        output.register_hook(lambda _grad: done.append("backward of blocks.1"))

    model.blocks[1].register_forward_hook(forward_is_done)
    model.blocks[0].register_forward_hook(watch_backward)
    loss = step(1)
    assert network.num_held == 0
    hold(network, "reduce_scatter", numels["blocks.2"])
    loss.backward()
    assert network.await_held().kind == "reduce_scatter"
    done.append("all of backward")
    network.open()
    runtime.sync_grads()
    runtime.close()
    return done


def hold(network: HeldNetwork, kind: str, numel: int) -> None:
    network.hold(lambda one: one.kind == kind and f"{numel} x float32" in one.carried)


def test_forward_goes_on_while_the_next_gather_is_held_and_backward_while_a_reduction_is():
    expected = ["forward of blocks.1", "backward of blocks.1", "all of backward"]
    assert run_ranks(compute_on_a_held_network, 2) == [expected] * 2
