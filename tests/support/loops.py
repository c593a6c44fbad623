# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A training loop around `shard`, and the same in one process over the batches of all ranks: the
losses and norms of both are compared. Knows no habit, no optimizer and no model but a toy."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint

from megatron_asynchzp import (
    ConfigurationError,
    LoadPlanner,
    SavePlanner,
    ShardedModel,
    ShardSizes,
    shard,
)
from tests.support.engine import build_toy
from tests.support.toy_models import toy_batch, toy_loss

CLIP, STEPS, MICRO_BATCHES = 0.3, 3, 2
Sizes = tuple[int, int, int]
SIZES: tuple[Sizes, ...] = (2, 2, 2), (1, 1, 2)
SIZES_OF_4: tuple[Sizes, ...] = (4, 4, 4), (2, 2, 4), (1, 2, 4), (1, 1, 1)

Losses = Callable[[Any, int, int], Iterable[torch.Tensor]]
"""Of a model, a step and a rank: the losses that are handed to backward in turn."""
Step = Callable[[ShardedModel, Iterable[torch.Tensor]], float]
"""Takes the losses of a step; returns the gradient norm where it clips, else 0."""
Seen = list[tuple[float, float]]
"""Of each step the mean loss of the ranks, and the norm."""


def new_adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sharded_toy(sizes: Sequence[Any], model: Any = None, **kwargs: Any) -> ShardedModel:
    model = build_toy() if model is None else model
    return shard(model, model.blocks, ShardSizes(*sizes), new_adamw, **kwargs)


def params_of(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in sharded.full_params()}


def save(sharded: ShardedModel, folder: Path, **state: Any) -> None:
    checkpoint.save(sharded.state_dict(**state), checkpoint_id=folder, planner=SavePlanner())


def load(sharded: ShardedModel, folder: Path, **given: Any) -> None:
    state = sharded.state_dict(**given)
    checkpoint.load(state, checkpoint_id=folder, planner=LoadPlanner())
    sharded.load_state_dict(state)


def optimizer_params(sharded: ShardedModel) -> list[nn.Parameter]:
    return [param for group in sharded.optimizer.param_groups for param in group["params"]]


def one(model: nn.Module, step: int, rank: int) -> Iterable[torch.Tensor]:
    yield toy_loss(model, toy_batch(step, 0, rank))


def of_micro_batches(model: nn.Module, step: int, rank: int) -> Iterable[torch.Tensor]:
    for index in range(MICRO_BATCHES):
        yield toy_loss(model, toy_batch(step, index, rank)) / MICRO_BATCHES


def backward_all(losses: Iterable[torch.Tensor]) -> None:
    for loss in losses:
        loss.backward()


def stepping(
    zero: Callable[[ShardedModel], object] = ShardedModel.zero_grad,
    between: Callable[[ShardedModel], object] = lambda sharded: None,
    clips: bool = True,
) -> Step:
    """between: what a loop does after backward."""

    def step(sharded: ShardedModel, losses: Iterable[torch.Tensor]) -> float:
        zero(sharded)
        backward_all(losses)
        between(sharded)
        norm = sharded.clip_grad_norm_(CLIP).item() if clips else 0.0
        sharded.step()
        return norm

    return step


usual_step, unclipped_step = stepping(), stepping(clips=False)


def marking_step(
    sharded: ShardedModel, losses: Iterable[torch.Tensor], step: Step = usual_step
) -> float:
    """As the README's, which says before each forward whether it is the last one of the step."""

    def marked() -> Iterable[torch.Tensor]:
        left = iter(losses)
        for index in range(MICRO_BATCHES):
            sharded.set_is_last_micro_batch(index == MICRO_BATCHES - 1)
            yield next(left)

    return step(sharded, marked())


def train(
    sharded: ShardedModel,
    losses: Losses,
    take_step: Step = usual_step,
    steps: Iterable[int] = range(STEPS),
    group: dist.ProcessGroup | None = None,
) -> Seen:
    """On all ranks of the group."""
    seen = []
    for step in steps:
        total = torch.zeros(())

        def noted(step: int = step, total: torch.Tensor = total) -> Iterable[torch.Tensor]:
            for loss in losses(sharded.model, step, dist.get_rank()):
                total += loss.detach()
                yield loss

        norm = take_step(sharded, noted())
        dist.all_reduce(total, group=group)
        seen.append((total.item() / dist.get_world_size(group), norm))
    return seen


def clipped(params: Iterable[nn.Parameter]) -> float:
    return nn.utils.clip_grad_norm_(params, CLIP).item()


def unclipped(params: Iterable[nn.Parameter]) -> float:
    return 0.0


def train_plainly(
    model: nn.Module,
    losses: Losses,
    ranks: Iterable[int] | None = None,
    clip: Callable[[Iterable[nn.Parameter]], float] = clipped,
    steps: Iterable[int] = range(STEPS),
    new_optimizer: Callable[[list], torch.optim.Optimizer] = new_adamw,
    zeroes: bool = True,
    rel: float = 1e-6,
) -> list:
    """In one process, over the batches of `ranks`, or of all; to be compared within `rel`.

    clip: what is done to the gradients; zeroes: or gradients of steps add up."""
    ranks = list(range(dist.get_world_size()) if ranks is None else ranks)
    optimizer, seen = new_optimizer(list(model.named_parameters())), []
    for step in steps:
        if zeroes:
            model.zero_grad()
        total = 0.0
        for rank in ranks:
            for loss in losses(model, step, rank):
                (loss / len(ranks)).backward()
                total += loss.item() / len(ranks)
        norm = clip(model.parameters())
        optimizer.step()
        seen.append(pytest.approx((total, norm), rel=rel, abs=1e-7))
    return seen


def units_of(model: Any) -> list[nn.Module]:
    return list(
        getattr(model, "blocks", None) or getattr(model, "layers", None) or model.children()
    )


@dataclass(frozen=True)
class Loop:
    """A model, its losses, optimizer and step, in shards and in one process."""

    build: Callable[[], Any] = build_toy
    losses: Losses = one
    step: Step = usual_step
    new_optimizer: Callable[[list], torch.optim.Optimizer] = new_adamw
    units: Callable[[Any], Iterable[nn.Module]] = units_of
    clip: Callable[[Iterable[nn.Parameter]], float] = clipped  # in one process, as `step` does

    def sharded(self, sizes: Sequence[Any], model: Any = None, **kwargs: Any) -> ShardedModel:
        model = self.build() if model is None else model
        return shard(model, self.units(model), ShardSizes(*sizes), self.new_optimizer, **kwargs)

    def train(
        self,
        sharded: ShardedModel,
        steps: Iterable[int] = range(STEPS),
        group: dist.ProcessGroup | None = None,
    ) -> Seen:
        return train(sharded, self.losses, self.step, steps, group)

    def plainly(
        self, steps: Iterable[int] = range(STEPS), model: Any = None, **kwargs: Any
    ) -> list:
        model = self.build() if model is None else model
        how = {"clip": self.clip, "new_optimizer": self.new_optimizer} | kwargs
        return train_plainly(model, self.losses, steps=steps, **how)


def trains_alike(
    sizes: Sizes,
    build: Callable[[], nn.Module] = build_toy,
    losses: Losses = one,
    step: Step = usual_step,
    steps: int = STEPS,
    after: Callable[[nn.Module], object] = lambda model: None,
    new_optimizer: Callable[[list], torch.optim.Optimizer] = new_adamw,
    **plainly: Any,
) -> None:
    """after: what is done to the model once it is sharded, and to the plain one; plainly: see
    train_plainly."""
    loop = Loop(build, losses, step, new_optimizer)
    plain = build()
    after(plain)
    expected = loop.plainly(range(steps), plain, **plainly)
    with loop.sharded(sizes) as sharded:
        after(sharded.model)
        assert loop.train(sharded, range(steps)) == expected, sizes


Turn = tuple[Sequence[int], Callable[[Sequence[Any], int, int], torch.Tensor]]
"""Which models are trained, and by which loss of the models, a step and a rank."""


def train_in_turns(
    models: Sequence[nn.Module], owners: Sequence[Any], turns: Sequence[Turn], ranks: Sequence[int]
) -> torch.Tensor:
    """The loss of each turn of each step, over the batches of `ranks`. owners: what has the
    `zero_grad` and the `step` of each model."""
    found = []
    for step in range(STEPS):
        for trained, loss_of in turns:
            for index in trained:
                owners[index].zero_grad()
            losses = [loss_of(models, step, rank) / len(ranks) for rank in ranks]
            backward_all(losses)
            for index in trained:
                owners[index].step()
            found.append(sum(loss.item() for loss in losses))
    return torch.tensor(found)


def trains_in_turns(
    all_sizes: Iterable[Sizes], build: Callable[[], list[Any]], turns: Sequence[Turn]
) -> None:
    """Several models in one loop, each of whose layers are units."""
    world, rank, models = dist.get_world_size(), dist.get_rank(), build()
    optimizers = [new_adamw(model.parameters()) for model in models]
    expected = train_in_turns(models, optimizers, turns, range(world))
    for sizes in all_sizes:
        models = build()
        all_sharded = [
            shard(model, units_of(model), ShardSizes(*sizes), new_adamw) for model in models
        ]
        found = train_in_turns(models, all_sharded, turns, [rank])
        dist.all_reduce(found)
        assert torch.allclose(found / world, expected, rtol=1e-6, atol=0), sizes
        for sharded in all_sharded:
            sharded.close()


def assert_refused(what: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        what()
    assert "\n" not in str(caught.value)
