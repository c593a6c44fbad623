# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that go on beside training, and those of other systems as the page loads them."""

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from megatron_asynchzp import ConfigurationError, LoadPlanner, ShardedModel, ShardSizes, shard
from scripts.testbed.ranks import run_ranks
from tests.support.engine import build_toy
from tests.support.loops import load, new_adamw, one, save, sharded_toy, usual_step
from tests.support.toy_models import toy_batch, toy_loss

_PAGE = Path(__file__).parents[3] / "docs" / "library.md"


def shared_folder() -> Path:
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(str(found[0]))


def halving(sharded: ShardedModel) -> LambdaLR:
    return LambdaLR(sharded.optimizer, lambda step: 0.5**step)


def train_on(sharded: ShardedModel, scheduler: LRScheduler, steps: range) -> list[float]:
    norms = []
    for step in steps:
        norms.append(usual_step(sharded, one(sharded.model, step, dist.get_rank())))
        scheduler.step()
    return norms


def one_cycle(sharded: ShardedModel) -> OneCycleLR:
    return OneCycleLR(sharded.optimizer, max_lr=0.01, total_steps=8)


def cosine(sharded: ShardedModel) -> CosineAnnealingLR:
    return CosineAnnealingLR(sharded.optimizer, T_max=4)


def save_beside(sharded: ShardedModel, folder: Path) -> Any:
    """What is waited for after two more steps."""
    for shared in (None, dist.group.WORLD):
        with pytest.raises(ConfigurationError, match=r"dist.new_group\(backend="):
            checkpoint.async_save(sharded.state_dict(), checkpoint_id=folder, process_group=shared)
    group = dist.new_group(backend="gloo")
    return checkpoint.async_save(sharded.state_dict(), checkpoint_id=folder, process_group=group)


def schedulers_go_on() -> None:
    """Each is made before the load: what it has put into the groups of the optimizer may be missing
    in the checkpoint, which was saved before it was made, or with it."""
    for new_scheduler, save_with_it in ((halving, save_beside), (one_cycle, save), (cosine, save)):
        folder = shared_folder()
        with sharded_toy((1, 2, 2)) as sharded:
            save(sharded, folder / "no scheduler")
            scheduler = new_scheduler(sharded)
            train_on(sharded, scheduler, range(2))
            saving = save_with_it(sharded, folder / "with it")
            schedule = scheduler.state_dict()
            expected = train_on(sharded, scheduler, range(2, 4))
            if saving is not None:
                saving.result()
            groups = settings_of(sharded)
        with sharded_toy((2, 2, 2)) as other:
            scheduler = new_scheduler(other)
            load(other, folder / "no scheduler")
            train_on(other, scheduler, range(1))  # from the rate that was saved, as with torch
            load(other, folder / "with it")
            scheduler.load_state_dict(schedule)
            assert train_on(other, scheduler, range(2, 4)) == pytest.approx(expected, rel=1e-6)
            assert settings_of(other) == groups


def grouped(sizes: tuple[int, int, int], *kinds: str) -> ShardedModel:
    """Groups by the letters of `kinds`: m, v and e are of matrices, vectors and the embedding."""
    settings = {"m": {"lr": 0.02, "weight_decay": 0.3}, "v": {"lr": 0.005, "weight_decay": 0.0}}

    def new_optimizer(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        of_kind: dict[str, list[Any]] = {kind: [] for kind in kinds}
        for name, param in params:
            letter = "v" if param.ndim < 2 else "e" if "embedding" in name else "m"
            of_kind[next(kind for kind in kinds if letter in kind)].append((name, param))
        groups = [{"params": of_kind[kind], **settings.get(kind[0], {})} for kind in kinds]
        return torch.optim.AdamW(groups, lr=0.01)

    model = build_toy()
    return shard(model, model.blocks, ShardSizes(*sizes), new_optimizer)


def groups_go_on() -> None:
    """Each parameter has the settings that it had, in whatever group it is."""
    folder, schedule = shared_folder(), halving
    with grouped((1, 2, 2), "me", "v") as sharded:
        train_on(sharded, schedule(sharded), range(2))
        checkpoint.save(sharded.state_dict(), checkpoint_id=folder)
        expected = train_on(sharded, schedule(sharded), range(2, 4))
    for kinds in (("v", "me"), ("e", "v", "m"), ("me", "v")):
        with grouped((2, 2, 2), *kinds) as other:
            load(other, folder)
            found = train_on(other, schedule(other), range(2, 4))
            assert found == pytest.approx(expected, rel=1e-6), kinds
    for kinds in (("mev",), ("ev", "m")):
        with grouped((2, 2, 2), *kinds) as other:
            with pytest.raises(ConfigurationError, match="parameters of 2 groups with other set"):
                load(other, folder)


def settings_of(sharded: ShardedModel) -> list[dict]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in sharded.optimizer.param_groups
    ]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """With the mean of the gradients of all ranks, as of DistributedDataParallel."""
    optimizer.zero_grad()
    for rank in range(dist.get_world_size()):
        (toy_loss(model, toy_batch(step, 0, rank)) / dist.get_world_size()).backward()
    optimizer.step()


def recipe() -> str:
    """The code of the page."""
    found = re.search(
        r"```python\n(state = sharded\.state_dict\(\).*?)```", _PAGE.read_text(), re.S
    )
    assert found is not None
    return found[1]


def goes_on_from(is_fsdp: bool) -> None:
    """A checkpoint of fully_shard, or of a whole model, saved as torch's functions return it."""
    folder, model = shared_folder(), build_toy()
    if is_fsdp:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = new_adamw(model.parameters())
    for step in range(2):
        plain_step(model, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saved = {"model": model_state, "optim": optimizer_state}
    checkpoint.save(saved, checkpoint_id=folder)
    expected = []
    for step in range(2, 4):
        plain_step(model, optimizer, step)
        with torch.no_grad():
            expected.append(toy_loss(model, toy_batch(9, 0, 0)).item())
    with shard(build_toy(), None, ShardSizes(1, 2, 2), new_adamw) as sharded:
        with pytest.raises(CheckpointException, match="Coming from fully_shard"):
            checkpoint.load(sharded.state_dict(), checkpoint_id=folder, planner=LoadPlanner())
        names = {"sharded": sharded, "checkpoint": checkpoint, "folder": folder}
        exec(recipe().replace('("model", "optim")', '("model",)'), names)
        assert not any(sharded.optimizer.state.values())
        exec(recipe(), names)
        found = []
        for step in range(2, 4):
            sharded.zero_grad()
            toy_loss(sharded.model, toy_batch(step, 0, dist.get_rank())).backward()
            sharded.step()
            with torch.no_grad():
                found.append(toy_loss(sharded.model, toy_batch(9, 0, 0)).item())
    assert found == pytest.approx(expected, rel=1e-6)


def check_all() -> None:
    schedulers_go_on()
    groups_go_on()
    goes_on_from(is_fsdp=True)
    goes_on_from(is_fsdp=False)


@pytest.mark.habit("`async_save(sharded.state_dict())`", "a scheduler made before the load")
@pytest.mark.habit("a checkpoint of FSDP2 or of a whole model")
@pytest.mark.habit("resuming with the optimizer's groups in another order, or with others")
def test_a_checkpoint_of_fully_shard_of_a_plain_model_or_made_beside_training_goes_on():
    run_ranks(check_all, 2)
