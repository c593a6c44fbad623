# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine computes what torch DDP and FSDP2 compute, for every nesting of shard sizes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scripts.testbed.differences import worst_difference
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy, cut_sizes, nested_sizes
from tests.support.toy_models import toy_batch, toy_loss

STEPS = 3
# By name: what the model is made of, and micro-batches of a step.
MODELS = {
    "untied": ({}, 1),
    "untied, 3 micro-batches": ({}, 3),
    "tied, 2 micro-batches": ({"is_tied": True}, 2),
    "recomputed, 2 micro-batches": ({"recompute": True}, 2),
}
CUT_ON_8 = [(1, 4, 8, (2,)), (8, 8, 8, (2, 4))]


def train(model: torch.nn.Module, micro_batches: int) -> list[float]:
    """Losses of a plain AdamW loop; `model` averages gradients over ranks by itself."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for index in range(micro_batches):
            loss = toy_loss(model, toy_batch(step, index, dist.get_rank())) / micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def ddp_losses(micro_batches: int, **kwargs) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build_toy(**kwargs)
    losses = train(DistributedDataParallel(model), micro_batches)
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def fsdp2_losses(micro_batches: int) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    model = build_toy()
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), micro_batches)


def compare_with_ddp(sizes_list: list[tuple[Any, ...]], is_product: bool) -> dict[str, float]:
    """Every model with all sizes; or, without `is_product`, each of the sizes with one model."""
    worst = {}
    for index, (model, (kwargs, micro_batches)) in enumerate(MODELS.items()):
        chosen = sizes_list if is_product else sizes_list[index :: len(MODELS)]
        if not chosen:
            continue
        expected, params = ddp_losses(micro_batches, **kwargs)
        for sizes in chosen:
            trainer = EngineTrainer(build_toy(**kwargs), sizes)
            losses = [trainer.step(step, micro_batches) for step in range(STEPS)]
            mine = trainer.full_params()
            assert mine.keys() == params.keys()
            # Adam turns a rounding error of a tiny gradient into a part of a step of 1e-2.
            for name, param in params.items():
                torch.testing.assert_close(mine[name], param, rtol=0, atol=1e-4)
            worst[f"{model} {sizes}"] = worst_difference(losses, expected)
            trainer.runtime.close()
    assert len(worst) == len(sizes_list) * (len(MODELS) if is_product else 1)
    return worst


def compare_with_fsdp2() -> float:
    expected = fsdp2_losses(3)
    trainer = EngineTrainer(build_toy(), (2, 4, 4))
    losses = [trainer.step(step, 3) for step in range(STEPS)]
    return worst_difference(losses, expected)


def assert_all_close(results: list[dict[str, float]]) -> None:
    bad = {name: error for name, error in results[0].items() if not error <= 1e-6}
    assert not bad


def test_every_nesting_on_2_and_4_ranks_follows_ddp():
    for world_size in (2, 4):
        assert_all_close(run_ranks(compare_with_ddp, world_size, nested_sizes(world_size), False))


@pytest.mark.parametrize(
    "world_size, chains",
    [(8, [(2, 4, 8), *CUT_ON_8]), (6, [(1, 2, 6), (6, 3, 6)])],
)  # fmt: skip
def test_three_sizes_cut_axes_and_a_world_that_is_no_power_of_two_follow_ddp(world_size, chains):
    assert_all_close(run_ranks(compare_with_ddp, world_size, chains, False))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 6, 8])
def test_every_model_with_every_nesting_follows_ddp(world_size):
    sizes = nested_sizes(world_size) + cut_sizes(world_size)
    assert_all_close(run_ranks(compare_with_ddp, world_size, sizes, True, timeout_s=600))


def test_the_engine_follows_fsdp2():
    assert run_ranks(compare_with_fsdp2, 4)[0] <= 1e-6
