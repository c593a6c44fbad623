# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a loop keeps of its rank's parts is saved by sharded.state_dict(extra=...), and any sizes
can load it; saved in another way it is refused by name."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from megatron_asynchzp import ConfigurationError, SavePlanner, ShardedModel
from scripts.testbed.ranks import run_ranks
from tests.support.loops import (
    Loop,
    assert_refused,
    backward_all,
    new_adamw,
    optimizer_params,
    unclipped_step,
)

Shadows = dict[str, torch.Tensor]
STEPS, DECAY = 2, 0.9


def build() -> nn.Module:
    torch.manual_seed(0)
    # A bias is cut in the middle, and of another unit a rank has nothing.
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))


def losses_of(model: nn.Module, *_: int) -> list[torch.Tensor]:
    return [model(torch.arange(8.0).view(2, 4)).square().mean()]


LOOP = Loop(build, losses_of, unclipped_step, units=list)


def named(sharded: ShardedModel) -> dict[str, nn.Parameter]:
    (group,) = sharded.optimizer.param_groups
    return dict(zip(group["param_names"], group["params"], strict=True))


def lerp(shadows: Shadows, params: dict[str, Any]) -> Shadows:
    with torch.no_grad():
        for name, param in params.items():
            shadows[name].lerp_(param, 1 - DECAY)
    return shadows


def lerp_together(shadows: Shadows, params: dict[str, Any]) -> Shadows:
    with torch.no_grad():
        torch._foreach_lerp_([*shadows.values()], [*params.values()], 1 - DECAY)
    return shadows


def add(shadows: Shadows, params: dict[str, Any]) -> Shadows:
    return {
        name: DECAY * shadows[name] + (1 - DECAY) * param.detach() for name, param in params.items()
    }


def zeros(param: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(param).copy_(param)


AVERAGES: dict[str, tuple[Callable[[Any], torch.Tensor], Callable[[Shadows, Any], Shadows]]] = {
    "a clone": (lambda param: param.detach().clone(), lerp),
    "a deep copy": (lambda param: copy.deepcopy(param).requires_grad_(False), lerp_together),
    "a copy of a copy": (lambda param: copy.deepcopy(param.data.clone()), add),
    "the same on the host": (lambda param: zeros(param.detach()).cpu(), lerp_together),
}


def averaged(sharded: ShardedModel, make: Any, update: Any, steps: int = STEPS) -> Shadows:
    shadows = {name: make(param) for name, param in named(sharded).items()}
    for _ in range(steps):
        sharded.zero_grad()
        backward_all(losses_of(sharded.model))
        sharded.step()
        shadows = update(shadows, named(sharded))
    return shadows


def averaged_plainly() -> Shadows:
    model = build()
    optimizer = new_adamw(model.named_parameters())
    shadows = {name: param.detach().clone() for name, param in model.named_parameters()}
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward_all(losses_of(model))
        optimizer.step()
        lerp(shadows, dict(model.named_parameters()))
    return shadows


def assert_close(found: Shadows, expected: Shadows, case: object) -> None:
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-6), (case, name)


def save_averages(folder: Path) -> None:
    for index, (name, (make, update)) in enumerate(AVERAGES.items()):
        with LOOP.sharded(((2, 2, 2), (1, 1, 2))[index % 2]) as sharded:
            shadows = averaged(sharded, make, update)
            state = sharded.state_dict(extra={"ema": shadows})
            checkpoint.save(state, checkpoint_id=folder / name)


def load_averages(folder: Path, sizes: tuple[int, int, int]) -> None:
    expected = averaged_plainly()
    for name, (make, _) in AVERAGES.items():
        whole = {key: torch.empty_like(value) for key, value in expected.items()}
        checkpoint.load({"ema": whole}, checkpoint_id=folder / name)
        assert_close(whole, expected, name)
        with LOOP.sharded(sizes) as sharded:
            shadows = {key: make(param).zero_() for key, param in named(sharded).items()}
            state = sharded.state_dict(extra={"ema": shadows})
            checkpoint.load(state, checkpoint_id=folder / name)
            sharded.load_state_dict(state)
            with sharded.changing_params(), torch.no_grad():
                for key, param in named(sharded).items():
                    param.copy_(shadows[key])
            assert_close(dict(sharded.full_params()), expected, name)


@pytest.mark.habit("an average of weights in a dict, saved beside `sharded.state_dict()`")
def test_averages_of_a_ranks_parts_are_loaded_into_other_sizes_and_numbers_of_ranks(tmp_path):
    run_ranks(save_averages, 2, tmp_path)
    run_ranks(load_averages, 2, tmp_path, (1, 2, 2))
    run_ranks(load_averages, 1, tmp_path, (1, 1, 1))


# ---- what has no place in a checkpoint


def check_refusals(folder: Path) -> None:
    with LOOP.sharded((2, 2, 2)) as sharded:
        backward_all(losses_of(sharded.model))
        params = named(sharded)
        flat = torch.cat([param.detach().flatten() for param in params.values()])
        copies = {name: zeros(param) for name, param in params.items()}
        for state in (
            {**sharded.state_dict(), "more": {"0.weight": [copies["0.weight"]]}},
            {"more": {"0.weight": copy.deepcopy(flat)}},
            {"more": {"0.weight": {name: param.grad for name, param in params.items()}}},
            {"more": {"0.weight": params["0.weight"]}},
        ):
            with pytest.raises(checkpoint.CheckpointException) as caught:
                checkpoint.save(state, checkpoint_id=folder / "refused")
            for error, _ in caught.value.failures.values():
                assert isinstance(error, ConfigurationError) and "\n" not in str(error)
                assert "part of 0.weight" in str(error) and "state_dict(extra=" in str(error)
        for extra, text in (
            ({"model": copies}, "has a key of sharded.state_dict"),
            ({"ema": {"0.wight": flat}}, r"0\.wight.* does not name a trained parameter"),
            ({"ema": {"0.weight": flat}}, r"has shape \(\d+,\); it has to have one value for each"),
            ({"ema": {"0.weight": build()[0].weight}}, r"has shape \(4, 4\)"),
        ):
            assert_refused(lambda extra=extra: sharded.state_dict(extra=extra), text)
        # A scalar of a part is a number as any other, and torch.save takes what a rank has.
        assert type(flat.sum()) is torch.Tensor
        file = folder / f"{torch.distributed.get_rank()}.pt"
        torch.save(flat, file)
        assert type(torch.load(file)) is torch.Tensor


def test_parts_that_a_checkpoint_would_take_for_what_all_ranks_have_are_refused(tmp_path):
    run_ranks(check_refusals, 2, tmp_path)


def as_tensors(params: dict[str, nn.Parameter]) -> Any:
    shadows = {name: torch.zeros(param.shape) for name, param in params.items()}
    return lerp(shadows, params)


def as_a_list(params: dict[str, nn.Parameter]) -> Any:
    shadows = [torch.zeros(param.shape) for param in params.values()]
    torch._foreach_copy_(shadows, [param.grad for param in params.values()])
    return shadows


def as_one_tensor(params: dict[str, nn.Parameter]) -> Any:
    flat = torch.zeros(sum(param.numel() for param in params.values()))
    views = flat.split([param.numel() for param in params.values()])
    for view, param in zip(views, params.values(), strict=True):
        view.copy_(param.detach())
    return flat


def as_outputs(params: dict[str, nn.Parameter]) -> Any:
    flat = torch.zeros(sum(param.numel() for param in params.values()))
    return torch.cat([param.detach() for param in params.values()], out=flat)


def as_a_module(params: dict[str, nn.Parameter]) -> Any:
    module = nn.ParameterDict(
        {f"p{index}": torch.zeros(param.shape) for index, param in enumerate(params.values())}
    )
    with torch.no_grad():
        for shadow, param in zip(module.values(), params.values(), strict=True):
            shadow.add_(param)
    return module.state_dict()


def as_data(params: dict[str, nn.Parameter]) -> Any:
    shadows = {name: torch.zeros(param.shape) for name, param in params.items()}
    for name, param in params.items():
        shadows[name].data.add_(param.detach())
    return shadows


def as_arrays(params: dict[str, nn.Parameter]) -> Any:
    return {name: torch.tensor(param.tolist()) for name, param in params.items()}


def check_made_without_params(folder: Path) -> None:
    with LOOP.sharded((2, 2, 2)) as sharded:
        backward_all(losses_of(sharded.model))
        made = (as_tensors, as_a_list, as_one_tensor, as_outputs, as_a_module)
        # What no function of torch writes from a part has other values, which a planner can see.
        for make in (*made, as_data, as_arrays):
            planners = [SavePlanner(enable_plan_caching=True)]
            for planner in [*planners, None] if make in made else planners:
                state = {**sharded.state_dict(), "ema": make(named(sharded))}
                with pytest.raises(checkpoint.CheckpointException) as caught:
                    checkpoint.save(state, checkpoint_id=folder / "refused", planner=planner)
                for error, _ in caught.value.failures.values():
                    assert isinstance(error, ConfigurationError) and "\n" not in str(error)
                    assert "ema" in str(error) and "state_dict(extra=" in str(error), make


def check_values_of_ranks(folder: Path) -> None:
    """A plan that is kept from the save before says nothing of values."""
    rank = torch.distributed.get_rank()
    for index, values in enumerate((torch.ones(5), torch.ones(5) + rank)):
        state = {"loss": torch.tensor(1.0 + rank), "flags": torch.tensor([rank]), "x": values}
        planner = SavePlanner(enable_plan_caching=True)
        with (
            nullcontext()
            if index == 0
            else pytest.raises(
                checkpoint.CheckpointException, match="x has other values on rank 1 than on rank 0"
            )
        ):
            checkpoint.save(state, checkpoint_id=folder / str(index), planner=planner)


def check_both(folder: Path) -> None:
    check_values_of_ranks(folder)
    check_made_without_params(folder)


def test_parts_that_are_written_to_a_tensor_of_the_loop_are_refused_as_well(tmp_path):
    run_ranks(check_both, 2, tmp_path)


def check_early_states(folder: Path) -> None:
    with LOOP.sharded((2, 2, 2)) as sharded:
        for param in optimizer_params(sharded):
            sharded.optimizer.state[param]["ema"] = param.detach().clone()
        backward_all(losses_of(sharded.model))
        assert_refused(
            sharded.step, r"state of 0\.weight has 'ema' before its first update, so AdamW"
        )
        sharded.optimizer.state.clear()
        sharded.step()
        for param in optimizer_params(sharded):
            sharded.optimizer.state[param]["ema"] = param.detach().clone()
        sharded.sleep()
        sharded.wake()
        averaged(sharded, lambda param: param, lambda shadows, _: shadows, steps=1)
        checkpoint.save(sharded.state_dict(), checkpoint_id=folder)
    expected = averaged_plainly_once()
    whole = {f"optim.{name}.ema": torch.empty_like(value) for name, value in expected.items()}
    checkpoint.load(whole, checkpoint_id=folder)
    assert_close({name: whole[f"optim.{name}.ema"] for name in expected}, expected, "states")


def averaged_plainly_once() -> Shadows:
    model = build()
    optimizer = new_adamw(model.named_parameters())
    backward_all(losses_of(model))
    optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.habit("a state of one's own in `sharded.optimizer.state` before the first step")
def test_a_state_of_the_loop_is_refused_before_the_first_step_and_saved_after_it(tmp_path):
    run_ranks(check_early_states, 2, tmp_path)
