# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a rank's parts: as in one process, whatever is asked of them and when, or refused
by name.
"""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ConfigurationError, ShardedModel, ShardSizes, shard
from megatron_asynchzp.library.optimizer import _refuse_other_parts, refuse_optimizer
from scripts.testbed.ranks import run_ranks
from tests.support.loops import Loop, load, optimizer_params, save, unclipped, unclipped_step
from tests.support.selection import slow_unless

SIZES = (2, 2, 4), (1, 1, 2), (2, 2, 2), (1, 1, 1)  # of 4 ranks
SIZES_OF_2 = (2, 2, 2), (1, 1, 2)
OF_2_OR_4 = pytest.mark.parametrize(
    "num_ranks, all_sizes", [(2, SIZES_OF_2), slow_unless(False, 4, SIZES)], ids=["2", "4"]
)
STEPS = 3
New = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Heads(nn.Module):
    """A trunk, and heads of which a call takes one."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        for layer in self.trunk:
            x = layer(x).tanh()
        return self.heads[head](x)


def build() -> Heads:
    torch.manual_seed(7)
    model = Heads()
    model.trunk[1].weight.no_decay = True
    return model


def loss_of(model: nn.Module, step: int, rank: int, head: int = 0) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x, head) - 2).square().mean()


Chosen = Callable[[int], int]


def loop_of(new: New, chosen: Chosen = lambda step: 0) -> Loop:
    """In each step of the loop the head is taken that `chosen` says."""

    def losses(model: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
        return [loss_of(model, step, rank, chosen(step))]

    def units(model: Heads) -> list[nn.Module]:
        return [*model.trunk, *model.heads]

    return Loop(build, losses, unclipped_step, new, units, unclipped)


def sharded_heads(new: New, sizes: Sequence[int]) -> ShardedModel:
    return loop_of(new).sharded(sizes)


def plainly(
    new: New, chosen: Chosen = lambda step: 0, steps: int = STEPS
) -> dict[str, torch.Tensor]:
    """What one process trains."""
    made: list[Any] = []

    def started(params: list) -> torch.optim.Optimizer:
        made.append(new(params))
        getattr(made[0], "train", bool)()
        return made[0]

    model = build()
    loop_of(started, chosen).plainly(range(steps), model)
    getattr(made[0], "eval", bool)()
    return dict(model.named_parameters())


def train(sharded: ShardedModel, steps: Sequence[int], chosen: Chosen = lambda step: 0) -> None:
    loop_of(new_adamw, chosen).train(sharded, steps)


def assert_same(sharded: ShardedModel, expected: dict[str, torch.Tensor], what: object) -> None:
    for name, value in sharded.full_params():
        assert torch.allclose(value, expected[name], rtol=0.0, atol=1e-6), (what, name)


# ---- optimizers


class Counting(torch.optim.Optimizer):
    """As apex's and Transformer Engine's FusedAdam: the count of steps is in the group."""

    is_elementwise = True

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    mean = state.setdefault("exp_avg", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.1)
                    rate = group["lr"] / (1 - 0.9 ** group["step"])
                    param.data = param - rate * mean / (1 + mean.abs())


class Lookahead(torch.optim.AdamW):
    """Slow weights that follow every second step."""

    is_elementwise = True

    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                for param in group["params"]:
                    state = self.state[param]
                    if param.grad is not None and group["count"] % 2 == 0:
                        slow = state.setdefault("slow", param.clone())
                        param.copy_(slow.lerp_(param, 0.5))


class ScheduleFree(torch.optim.Optimizer):
    """SGD as Schedule-Free's page has it: parameters are other ones for evaluation."""

    is_elementwise = True

    def __init__(self, params, lr=1e-1):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, is_train: bool, weight: float):
        for group in self.param_groups:
            if group["train_mode"] is not is_train:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
                group["train_mode"] = is_train

    def eval(self):
        self._move(False, 1 - 1 / 0.9)

    def train(self):
        self._move(True, 0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("step() in eval mode: call train()")
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.clone())
                    param.lerp_(z, 1 / (group["k"] + 1))
                    param.add_(param.grad, alpha=group["lr"] * (0.9 * (1 - 1 / (group["k"] + 1))))
                    z.sub_(param.grad, alpha=group["lr"])
            group["k"] += 1


class Kept(torch.optim.SGD):
    """One's own subclass, which adds nothing."""


class Momenta(torch.optim.Optimizer):
    """Its states are there from the start, and a count is a tensor of one element."""

    is_elementwise = True

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"m": torch.full_like(param, 0.1), "n": torch.zeros(1)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["n"] += 1
                    state["m"].mul_(0.9).add_(param.grad)
                    param.sub_(state["m"] * group["lr"] / state["n"])


def of(kind: Callable, **settings) -> New:
    return lambda named: kind(named, **settings)


def with_schedule_in_a_hook(named):
    optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def decayed_by_ndim(named):
    """The commonest habit there is, and attributes of the model's parameters, as Mamba has them."""

    def is_decayed(param):
        is_matrix = param.ndim >= 2
        assert is_matrix is (param.squeeze().dim() >= 2) is (len(param.stride()) >= 2)
        assert is_matrix is (param.flatten().numel() > len(param)) is (param.T[0].ndim > 0)
        return is_matrix and not getattr(param, "no_decay", False)

    groups = [
        {"params": [param for _, param in named if is_decayed(param)], "weight_decay": 0.5},
        {"params": [param for _, param in named if not is_decayed(param)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def rates_by_size(named):
    large = [param for _, param in named if param.numel() == 36 and param.shape[0] == 6]
    small = [param for _, param in named if param.data.numel() < 36 and len(param.size()) < 3]
    return torch.optim.SGD([{"params": large}, {"params": small, "lr": 0.3}], lr=0.1)


# ---- what parameters answer while the optimizer is made

SHAPED: list[Callable[[nn.Parameter], torch.Tensor]] = [
    *(torch.clone, torch.empty_like, torch.zeros_like, torch.tensor, torch.as_tensor, copy.copy),
    *(copy.deepcopy, nn.Parameter, torch.square, torch.Tensor.double, torch.Tensor.flatten),
    *(torch.squeeze, torch.t_copy, torch.unbind, torch.atleast_3d, torch.trace),
    *(lambda p: p.detach().cpu(), lambda p: p.to("meta"), lambda p: p.to("cpu", torch.float16)),
    *(lambda p: p.new_empty(p.shape), lambda p: p.data.clone().T, lambda p: p[0], lambda p: 2 * p),
    *(lambda p: p.sum(0, keepdim=True), lambda p: p.view(-1, 2), lambda p: torch.stack([p, p])),
    *(lambda p: torch.zeros_like(p, device="cpu"), lambda p: nn.Parameter(p.detach().clone())),
    *(lambda p: torch.rand_like(p, generator=torch.Generator()), lambda p: p.max(-1).values),
    *(lambda p: torch.nn.utils.parameters_to_vector([p, p]), lambda p: p.clone().mul_(2)),
]
VALUED: list[Callable[[nn.Parameter], object]] = [
    *(torch.Tensor.tolist, torch.unique, torch.nonzero, lambda p: p.detach().numpy()),
    *(lambda p: p.norm().item(), lambda p: bool(p.std() > 1), lambda p: float(p.sum())),
    *(lambda p: torch.equal(p, p.clone()), lambda p: f"{p.mean().item():.3f}"),
]


def shapes_said(param: nn.Parameter) -> list[object]:
    def said(ask: Callable) -> object:
        try:
            found = ask(param)
        except (RuntimeError, IndexError):
            return "an error"
        if isinstance(found, tuple):
            found = found[0]
        return found.shape, found.ndim, found.numel(), found.stride(), found.dtype

    return [said(ask) for ask in SHAPED]


def decided_by_shapes(all_sizes: Sequence[Sequence[int]]) -> None:
    for sizes in all_sizes:
        made_by_shapes(sizes)


def made_by_shapes(sizes: Sequence[int]) -> None:
    plain, kept = build(), []

    def new(named):
        assert [name for name, _ in named] == [name for name, _ in plain.named_parameters()]
        for (name, param), other in zip(named, plain.parameters(), strict=True):
            for ask, said, right in zip(SHAPED, shapes_said(param), shapes_said(other)):
                assert said == right, (name, ask)
            assert not isinstance(param.new_ones(2).sum().item(), torch.Tensor)
            for ask in VALUED:
                with pytest.raises(ConfigurationError, match="ask for names, shapes or attributes"):
                    ask(param)
            kept.append((param, torch.full_like(param, 2.0), param.clone(), param.T))
        return torch.optim.SGD(named, lr=0.1)

    model = build()
    with shard(model, [*model.heads, *model.trunk], ShardSizes(*sizes), new):
        for param, twos, clone, _ in kept:
            assert type(param) is not type(twos) is type(clone) is torch.Tensor
            assert param.ndim == 1 and torch.equal(twos, torch.full_like(param.data, 2.0))
            assert torch.equal(clone, param.data)


@pytest.mark.habit("groups by the shapes of copies, by values of parameters")
@OF_2_OR_4
def test_what_is_computed_of_parameters_says_the_whole_shape_while_the_optimizer_is_made(
    num_ranks, all_sizes
):
    run_ranks(decided_by_shapes, num_ranks, all_sizes)


def decayed_afterwards(param_groups: list[dict], shapes: dict[str, torch.Size]) -> None:
    """Decides once more, by the shapes of the model's parameters."""
    for group in param_groups:
        is_matrix = [len(shapes[name]) >= 2 for name in group["param_names"]]
        assert all(is_matrix) or not any(is_matrix)
        group["weight_decay"] = 0.5 if all(is_matrix) else 0.0


def by_name(named):
    """As by `id` in one process, where these are the model's own parameters."""
    named = list(named)
    decayed = {name for name, _ in build().named_parameters() if "weight" in name}
    groups = [[pair for pair in named if (pair[0] in decayed) is one] for one in (True, False)]
    return torch.optim.AdamW([{"params": pairs} for pairs in groups], lr=1e-2, weight_decay=0.3)


def decided_afterwards(all_sizes: Sequence[Sequence[int]]) -> None:
    def in_one_process(named):
        optimizer, shapes = by_name(named), {name: one.shape for name, one in named}
        decayed_afterwards(optimizer.param_groups, shapes)
        return optimizer

    expected = plainly(in_one_process)
    for sizes in all_sizes:
        model = build()
        names = {id(param): name for name, param in model.named_parameters()}

        def new(named, names=names):
            assert [name for name, _ in named] == list(names.values())
            assert not any(id(param) in names for _, param in named)
            return by_name(named)

        with shard(model, [*model.trunk, *model.heads], ShardSizes(*sizes), new) as sharded:
            groups = sharded.optimizer.param_groups
            assert {param.ndim for group in groups for param in group["params"]} == {1}
            whole = dict(sharded.model.named_parameters())
            decayed_afterwards(groups, {name: one.shape for name, one in whole.items()})
            assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
            train(sharded, range(STEPS))
            assert_same(sharded, expected, sizes)


@pytest.mark.habit(
    "settings by `p.ndim` of `sharded.optimizer`'s parameters, after `shard`",
    "groups by `id(p)` of the model's parameters",
)
@OF_2_OR_4
def test_groups_and_settings_follow_names_where_objects_and_shapes_are_those_of_parts(
    num_ranks, all_sizes
):
    run_ranks(decided_afterwards, num_ranks, all_sizes)


OPTIMIZERS: dict[str, New] = {
    "NAdam": of(torch.optim.NAdam, lr=1e-2),
    "Rprop": of(torch.optim.Rprop, lr=1e-2),
    "ASGD": of(torch.optim.ASGD, lr=1e-2, t0=1),
    "dampening": of(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "amsgrad": of(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "AdamW": of(torch.optim.AdamW, lr=1e-2),
    "RAdam": of(torch.optim.RAdam, lr=1e-2),
    "Adagrad": of(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "Adadelta": of(torch.optim.Adadelta, lr=1.0),
    "a rate that is a tensor": of(torch.optim.AdamW, lr=torch.tensor(1e-2)),
    "a count in the group": of(Counting),
    "Lookahead": of(Lookahead, lr=1e-2),
    "Schedule-Free": of(ScheduleFree),
    "a schedule in a hook": with_schedule_in_a_hook,
    "decay by ndim": decayed_by_ndim,
    "rates by size": rates_by_size,
    "a subclass": of(Kept, lr=0.1, momentum=0.9),
    "states from the start": of(Momenta),
}


def asked_too_early(all_sizes: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """States are asked for before there are any, and before each step."""
    for index, name in enumerate(names):
        new = OPTIMIZERS[name]
        expected = plainly(new)
        for sizes in all_sizes[index % len(all_sizes) :][:1]:
            with sharded_heads(new, sizes) as sharded:
                sharded.state_dict()
                if index % 2:
                    sharded.sleep(2)
                    sharded.state_dict()
                    sharded.wake()
                getattr(sharded.optimizer, "train", bool)()
                train(sharded, range(2))
                sharded.state_dict()
                train(sharded, range(2, STEPS))
                getattr(sharded.optimizer, "eval", bool)()
                assert_same(sharded, expected, (name, sizes))


def resumed(folder: Path, names: Sequence[str], all_sizes: Sequence[Sequence[int]]) -> None:
    """A checkpoint of before the first step and one of after it, each loaded into an optimizer that
    has a state and into one that has none, of other sizes."""
    for index, name in enumerate(names):
        new, there = OPTIMIZERS[name], folder / name
        expected = plainly(new)
        sizes, others = (all_sizes[(index + k) % len(all_sizes)] for k in range(2))
        with sharded_heads(new, sizes) as sharded:
            save(sharded, there / "0")
            getattr(sharded.optimizer, "train", bool)()
            train(sharded, range(2))
            save(sharded, there / "2")
            load(sharded, there / "0")
            getattr(sharded.optimizer, "train", bool)()
            if "hook" not in name:  # the schedule is not in the checkpoint
                train(sharded, range(STEPS))
                getattr(sharded.optimizer, "eval", bool)()
                assert_same(sharded, expected, (name, "from the start again"))
        with sharded_heads(new, others) as sharded:
            load(sharded, there / "2")
            train(sharded, range(2, STEPS))
            getattr(sharded.optimizer, "eval", bool)()
            assert_same(sharded, expected, (name, "from step 2", sizes, others))


def check_states(folder: Path, all_sizes, early: Sequence[str], late: Sequence[str]) -> None:
    asked_too_early(all_sizes, early)
    resumed(folder, late, all_sizes)


EARLY, LATE = ["Rprop", "Schedule-Free", "decay by ndim"], ["NAdam", "a count in the group"]


@pytest.mark.habit(
    "`sharded.state_dict()`, `sleep()` before the first step",
    "weight decay by `p.ndim >= 2` or an attribute (`p._no_weight_decay`), rates by `p.numel()`",
    "Schedule-Free: `optimizer.train()`, `optimizer.eval()`",
    "resuming from a checkpoint of before the first step",
    "a schedule that steps in a hook of the optimizer",
    "an optimizer that counts its steps in the group, or has states before its first step",
)
@pytest.mark.parametrize(
    "num_ranks, all_sizes, early, late",
    [
        (2, SIZES_OF_2, EARLY, LATE),
        slow_unless(False, 4, SIZES, list(OPTIMIZERS), list(OPTIMIZERS)),
    ],
    ids=["some", "all"],
)
def test_a_state_that_is_not_there_yet_is_asked_for_saved_and_resumed_as_such(
    num_ranks, all_sizes, early, late, tmp_path
):
    run_ranks(check_states, num_ranks, tmp_path, all_sizes, early, late, timeout_s=300.0)


# ---- modules that a step does not use


def in_turn(step: int) -> int:
    return step % 2


def new_adamw(named):
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.5)


def zeros_stay(sizes: Sequence[int]) -> None:
    """zero_grad(set_to_none=False): what had a gradient has zeros, and is decayed."""
    model, world = build(), dist.get_world_size()
    optimizer = new_adamw(model.named_parameters())
    with sharded_heads(new_adamw, sizes) as sharded:
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            sharded.optimizer.zero_grad(set_to_none=False)
            for rank in range(world):
                (loss_of(model, step, rank, in_turn(step)) / world).backward()
            loss_of(sharded.model, step, dist.get_rank(), in_turn(step)).backward()
            optimizer.step()
            sharded.optimizer.step()
        assert_same(sharded, dict(model.named_parameters()), sizes)


def of_several_ranks(sizes: Sequence[int]) -> None:
    """Groups of ranks take other heads, and other numbers of micro-batches: a head has a gradient
    where any of them gave it one."""
    in_step, world, rank = max(sizes[:2]), dist.get_world_size(), dist.get_rank()

    def heads_of(step: int, rank: int) -> list[int]:
        if step == 1 and rank // in_step:
            return [0, 1, 0]  # what crosses the groups is in the order of the others
        return [] if step == 3 else [0]

    model = build()
    optimizer = new_adamw(model.named_parameters())
    with sharded_heads(new_adamw, sizes) as sharded:
        for step in range(4):
            optimizer.zero_grad()
            sharded.zero_grad()
            for one in range(world):
                for head in heads_of(step, one):
                    (loss_of(model, step, one, head) / world).backward()
            mine = heads_of(step, rank)
            for index, head in enumerate(mine):
                sharded.set_is_last_micro_batch(index == len(mine) - 1)
                loss_of(sharded.model, step, rank, head).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert torch.allclose(sharded.clip_grad_norm_(0.5), norm, rtol=1e-5, atol=1e-7)
            optimizer.step()
            sharded.step()
        assert_same(sharded, dict(model.named_parameters()), sizes)


def unused(all_sizes: Sequence[Sequence[int]]) -> None:
    expected = plainly(new_adamw, in_turn, 5)
    for sizes in all_sizes:
        with sharded_heads(new_adamw, sizes) as sharded:
            train(sharded, range(4), in_turn)
            sharded.zero_grad()
            loss_of(sharded.model, 4, dist.get_rank(), 0).backward()
            named = sharded.optimizer.param_groups[0]
            for name, param in zip(named["param_names"], named["params"], strict=True):
                assert (param.grad is None) is ("heads.1" in name), name
            sharded.step()
            assert_same(sharded, expected, sizes)
        zeros_stay(sizes)
        if max(sizes[:2]) < dist.get_world_size():
            of_several_ranks(sizes)


@pytest.mark.habit(
    "modules that a step does not use (heads in turn)", "`zero_grad(set_to_none=False)`"
)
@OF_2_OR_4
def test_a_unit_that_no_backward_reaches_is_left_out_as_in_one_process(num_ranks, all_sizes):
    run_ranks(unused, num_ranks, all_sizes)


# ---- norms of a rank's part


def grads_of(sharded: ShardedModel) -> list[torch.Tensor]:
    return [param.grad for param in optimizer_params(sharded) if param.grad is not None]


def unscale(sharded: ShardedModel) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(sharded.optimizer)


def replace(sharded: ShardedModel) -> None:
    for param in optimizer_params(sharded):
        if param.grad is not None:
            param.grad = param.grad.detach().clone()


READERS: dict[str, Callable[[ShardedModel], object]] = {
    "nothing": lambda s: None,
    "unscale_": unscale,
    "a NaN check": lambda s: [bool(torch.isfinite(grad).all()) for grad in grads_of(s)],
    "a log": lambda s: [float(grad.abs().sum()) for grad in grads_of(s)],
    "replaced": replace,
    "clipped": lambda s: s.clip_grad_norm_(1e9),
    "values": lambda s: nn.utils.clip_grad_value_(optimizer_params(s), 1e9),
}
NORMS: dict[str, Callable[[ShardedModel], object]] = {
    "clip_grad_norm_": lambda s: nn.utils.clip_grad_norm_(optimizer_params(s), 1.0),
    "foreach": lambda s: nn.utils.clip_grad_norm_(optimizer_params(s), 1.0, foreach=True),
    "inf": lambda s: nn.utils.clip_grad_norm_(optimizer_params(s), 1.0, math.inf),
    "get_total_norm": lambda s: nn.utils.get_total_norm(grads_of(s)),
    "a loop": lambda s: sum(grad.norm() ** 2 for grad in grads_of(s)),
    "data": lambda s: sum(grad.data.norm(2) ** 2 for grad in grads_of(s)),
    "together": lambda s: torch.cat([grad.flatten() for grad in grads_of(s)]).norm(),
    "stacked": lambda s: torch.linalg.vector_norm(torch.cat(grads_of(s)) * 2),
}


def refused(what: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as found:
        what()
    return str(found.value)


def check_norms(all_sizes: Sequence[Sequence[int]]) -> None:
    new = of(torch.optim.SGD, lr=0.1)
    expected = plainly(new, steps=len(READERS) + 1)
    for sizes in all_sizes:
        with sharded_heads(new, sizes) as sharded:
            for step, read in enumerate(READERS.values()):
                sharded.zero_grad()
                loss_of(sharded.model, step, dist.get_rank()).backward()
                read(sharded)
                for norm in NORMS.values():
                    line = refused(lambda norm=norm: norm(sharded))
                    assert "sharded.clip_grad_norm_(max_norm)" in line and "\n" not in line
                sharded.step()

            # Also in a hook of the step, where gradients are about to be used.
            clip = sharded.optimizer.register_step_pre_hook(
                lambda *_: nn.utils.clip_grad_norm_(optimizer_params(sharded), 1.0)
            )
            sharded.zero_grad()
            loss_of(sharded.model, len(READERS), dist.get_rank()).backward()
            assert "sharded.clip_grad_norm_" in refused(sharded.optimizer.step)
            clip.remove()
            # A norm that is known scales what there is.
            nn.utils.clip_grads_with_norm_(
                optimizer_params(sharded), 1e9, sharded.clip_grad_norm_(1e9)
            )
            sharded.step()
            assert_same(sharded, expected, sizes)


@pytest.mark.habit("`get_total_norm`, `p.grad.norm()`")
@OF_2_OR_4
def test_the_norm_of_a_ranks_part_is_refused_whatever_was_read_before(num_ranks, all_sizes):
    run_ranks(check_norms, num_ranks, all_sizes)


# ---- which optimizers


def step_of(update: Callable[[torch.Tensor, dict], torch.Tensor]) -> type:
    class Own(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-2):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(group["lr"] * update(param, self.state[param]))

    return Own


def centralized(param: torch.Tensor, _: dict) -> torch.Tensor:
    return param.grad - param.grad.mean(-1, keepdim=True) if param.ndim > 1 else param.grad


class Estimates(torch.optim.Optimizer):
    """As Prodigy and D-Adaptation: a rate that all elements of all parameters decide."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            size = sum(float(param.grad.abs().sum()) for param in group["params"] if len(param))
            group["d"] = max(group["d"], 1e-6 * size)
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["d"] * param.grad.sign())


class Quantized(torch.optim.Optimizer):
    """As bitsandbytes' AdamW8bit: 8 bits per element, and a scale for each block of 64."""

    is_elementwise = True  # its author means it

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state, numel = self.state[param], param.numel()
                blocks = nn.functional.pad(param.grad.view(-1), (0, -numel % 64)).view(-1, 64)
                state["absmax"] = blocks.abs().amax(1)
                codes = blocks / state["absmax"].clamp(min=1e-9)[:, None] * 127
                state["codes"] = codes.to(torch.int8).view(-1)[:numel]
                param.sub_(param.grad, alpha=group["lr"])


class Handle:
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


class Holding(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.handle = Handle()

    def step(self, closure=None):
        super().step()


class Believed(Holding):
    is_elementwise = True


class Scaled(torch.optim.SGD):
    """A subclass of torch's own with a step of its own."""

    def step(self, closure=None):
        super().step()


NOT_ELEMENTWISE = {
    "Adafactor": torch.optim.Adafactor,
    "LAMB, LARS": step_of(lambda p, _: p.grad * p.norm() / (p.grad.norm() + 1e-9)),
    "centralized": step_of(centralized),
    "Estimates": Estimates,
    "a subclass": Scaled,
    "Muon": torch.optim.Muon,
    "Shampoo": type("DistributedShampoo", (Estimates,), {}),
    "Holding": Holding,
}


def made(kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    shape = (4, 6) if kind is torch.optim.Muon else (24,)  # parts are 1-D
    optimizer = kind([nn.Parameter(torch.randn(shape)) for _ in range(2)])
    for param in optimizer.param_groups[0]["params"]:
        param.data = param.data.view(-1)
    return optimizer


def test_what_looks_at_more_than_one_element_is_refused_by_name_with_the_remedy():
    for kind in NOT_ELEMENTWISE.values():
        optimizer = made(kind)
        before = [param.clone() for param in optimizer.param_groups[0]["params"]]
        line = refused(lambda optimizer=optimizer: refuse_optimizer(optimizer))
        assert line.startswith(type(optimizer).__name__) and "is_elementwise = True" in line
        assert "\n" not in line
        assert ("--optimizer muon" in line) is (kind.__name__ in ("Muon", "DistributedShampoo"))
        assert not optimizer.state
        for one, param in zip(before, optimizer.param_groups[0]["params"], strict=True):
            assert torch.equal(one, param) and param.grad is None


def test_states_that_are_not_one_value_per_element_are_refused_by_name():
    line = refused(lambda: refuse_optimizer(made(Quantized)))
    assert line.startswith("Quantized keeps a state 'absmax'") and "\n" not in line


def test_elementwise_optimizers_of_ones_own_are_taken_and_not_stepped():
    for kind in (Kept, Counting, Lookahead, ScheduleFree, Momenta, Believed):
        optimizer = made(kind)
        groups = [dict(group) for group in optimizer.param_groups]
        states = {key: dict(value) for key, value in optimizer.state.items()}
        refuse_optimizer(optimizer)
        assert groups == optimizer.param_groups and states == optimizer.state


class Unhooked(torch.optim.Optimizer):
    is_elementwise = True

    def __init__(self, params):
        self.param_groups = [{"params": [param for _, param in params], "lr": 0.1}]
        self.state = {}

    def step(self, closure=None):
        """Nothing."""


class Inner(torch.optim.Optimizer):
    """Of which the states are those of another one."""

    is_elementwise = True

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups[0]["params"], {})

    def step(self, closure=None):
        self.inner.step()


def muon_of_matrices(named):
    return torch.optim.Muon([pair for pair in named if pair[1].ndim == 2])


def check_refusals() -> None:
    for kind, text in (
        (muon_of_matrices, "Megatron's --optimizer muon"),
        (torch.optim.Adafactor, "Adafactor is not known to update each element"),
        (Quantized, "not one value per element"),
        (Unhooked, "does not call torch.optim.Optimizer.__init__"),
    ):
        assert text in refused(lambda kind=kind: sharded_heads(kind, (1, 1, 2)))
    with sharded_heads(Inner, (1, 1, 2)) as sharded:
        train(sharded, range(2))
        assert "its attribute .inner, an optimizer" in refused(sharded.state_dict)


@pytest.mark.habit(
    "Adafactor, LAMB, LARS, Prodigy, Muon, Shampoo: optimizers that look at more than one element",
    "8-bit optimizers, whose states are blocks",
    "an optimizer within an optimizer, saved",
)
def test_shard_refuses_an_optimizer_of_whole_matrices_and_a_checkpoint_that_lacks_states():
    run_ranks(check_refusals, 2)


def load_fewer_states(folder: Path) -> str:
    with sharded_heads(of(torch.optim.Adam, amsgrad=True), (1, 1, 2)) as sharded:
        train(sharded, range(1))
        save(sharded, folder)
    with sharded_heads(of(torch.optim.Adam), (1, 1, 2)) as sharded:
        return refused(lambda: load(sharded, folder))


@pytest.mark.habit("resuming with an optimizer that keeps fewer states")
def test_a_state_that_the_optimizer_does_not_keep_is_not_dropped_silently(tmp_path):
    for line in run_ranks(load_fewer_states, 2, tmp_path):
        assert "'max_exp_avg_sq' of trunk.0.weight" in line


@pytest.mark.parametrize(
    ("held", "whose"),
    [
        ([["a", 0, 4], ["b", 1, 3]], ""),  # as JSON gives them back
        ([("a", 0, 4)], "of another rank or other sizes"),
        ([("a", 4, 8), ("b", 1, 3)], "of another rank or other sizes"),
        (None, "of a model that is not sharded"),
    ],
)
def test_an_optimizer_loads_the_state_of_its_own_parts_and_no_other(held, whose):
    state: dict[str, Any] = {} if held is None else {"asynchzp_held": held}
    own = [("a", 0, 4), ("b", 1, 3)]
    if not whose:
        _refuse_other_parts(state, own)
        return
    with pytest.raises(ConfigurationError, match=f"this state of the optimizer is {whose}: each"):
        _refuse_other_parts(state, own)
