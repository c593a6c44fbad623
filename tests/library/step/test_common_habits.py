# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What people do out of habit with `shard`: it trains as in one process, or ends in one line."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron_asynchzp import ShardSizes, shard
from megatron_asynchzp.library.arguments import default_units
from scripts.testbed.ranks import RankPlace, free_port, run_ranks
from tests.support.engine import build_toy
from tests.support.loops import (
    SIZES,
    SIZES_OF_4,
    STEPS,
    Sizes,
    assert_refused,
    backward_all,
    new_adamw,
    one,
    params_of,
    sharded_toy,
    train,
    train_plainly,
    trains_in_turns,
    usual_step,
)
from tests.support.selection import slow_unless
from tests.support.toy_models import ToyLM, toy_batch, toy_loss

# ---- models


def build_three() -> list[nn.Module]:
    """Two that are trained, and one that is not."""
    return [build_toy(), build_toy(depth=2), build_toy(depth=1).requires_grad_(False)]


def of_three(models: Sequence[nn.Module], step: int, rank: int) -> torch.Tensor:
    first, second, teacher = (toy_loss(model, toy_batch(step, 0, rank)) for model in models)
    return first * second + (first - teacher) ** 2 + toy_loss(models[1], toy_batch(step, 1, rank))


def build_both() -> list[nn.Sequential]:
    """A generator and its critic."""
    torch.manual_seed(3)
    layers = [[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)] for _ in range(2)]
    return [nn.Sequential(*each) for each in layers]


def batch_of_both(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(9 * step + rank))


def through_the_critic(models: Sequence[nn.Module], step: int, rank: int) -> torch.Tensor:
    return models[1](models[0](batch_of_both(step, rank))).sin().sum()


def of_the_critic(models: Sequence[nn.Module], step: int, rank: int) -> torch.Tensor:
    x = batch_of_both(step, rank)
    return (models[1](models[0](x).detach()) - models[1](x)).square().sum()


def check_several_models(of_three_models: Sequence[Sizes], of_turns: Sequence[Sizes]) -> None:
    trains_in_turns(of_three_models, build_three, [((0, 1, 2), of_three)])
    of_critic = ((1,), of_the_critic)
    trains_in_turns(of_turns, build_both, [of_critic, ((0,), through_the_critic), of_critic])


@pytest.mark.habit("several models in one graph", "a GAN: models that are trained in turn")
@pytest.mark.parametrize(
    "all_sizes",
    [(SIZES_OF_4[1::2], SIZES_OF_4[:1]), slow_unless(False, (SIZES_OF_4, SIZES_OF_4))],
    ids=["some", "all"],
)
def test_several_models_in_one_graph_in_turn_and_a_frozen_one_train_as_in_one_process(all_sizes):
    run_ranks(check_several_models, 4, *all_sizes)


def check_average() -> None:
    """The average of parameters, kept of this rank's part and put in its place."""
    world, model = dist.get_world_size(), build_toy()
    optimizer = new_adamw(model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        optimizer.zero_grad()
        backward_all(toy_loss(model, toy_batch(step, 0, rank)) / world for rank in range(world))
        optimizer.step()
        average.update_parameters(model)
    expected = toy_loss(average, toy_batch(0, 0, 0)).item()
    for sizes in SIZES_OF_4:
        with sharded_toy(sizes) as sharded:
            params = [p for group in sharded.optimizer.param_groups for p in group["params"]]
            averages = []
            for step in range(STEPS):
                usual = [toy_loss(sharded.model, toy_batch(step, 0, dist.get_rank()))]
                sharded.zero_grad()
                backward_all(usual)
                sharded.step()
                values = [param.detach() for param in params]
                if not averages:
                    averages = [value.clone() for value in values]
                torch._foreach_lerp_(averages, values, 0.1)
            trained = [value.clone() for value in values]
            with sharded.changing_params():
                torch._foreach_copy_(values, averages)
            with torch.no_grad():
                found = toy_loss(sharded.model, toy_batch(0, 0, 0)).item()
            assert found == pytest.approx(expected, rel=1e-6), sizes
            with sharded.changing_params():
                torch._foreach_copy_(values, trained)
            usual_step(sharded, one(sharded.model, 0, 0))


@pytest.mark.habit("an average of weights")
def test_an_average_of_the_parameters_evaluates_as_in_one_process():
    run_ranks(check_average, 4)


def check_compiled(all_sizes: Sequence[Sizes], is_whole: bool) -> None:
    """The units or the model, before or after they are sharded."""
    expected = train_plainly(build_toy(), one)
    for sizes, is_before in product(all_sizes, (True, False)):
        model = build_toy()
        whole = torch.compile(model, backend="aot_eager") if is_whole else model
        if is_before and not is_whole:
            compile_blocks(model)
        handed = whole if is_before else model
        with shard(handed, model.blocks, ShardSizes(*sizes), new_adamw) as sharded:
            if not is_before and not is_whole:
                compile_blocks(model)

            def losses(_, step, rank, whole=whole):
                return one(whole, step, rank)

            assert train(sharded, losses) == expected, (sizes, is_before)


def compile_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


@pytest.mark.parametrize(
    "world_size, all_sizes, is_whole",
    [
        (2, SIZES[:1], False),
        slow_unless(False, 4, SIZES_OF_4, False),
        slow_unless(False, 2, SIZES, True),
    ],
)
@pytest.mark.habit(
    "`torch.compile` of units, before or after `shard`",
    "`torch.compile` of the model, before or after `shard`",
)
def test_what_is_compiled_trains_as_in_one_process(world_size, all_sizes, is_whole):
    run_ranks(check_compiled, world_size, all_sizes, is_whole)


def check_defaults() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    expected = train_plainly(build_toy(), one)
    model = build_toy()
    with shard(model, optimizer=new_adamw) as sharded:
        layers = {unit.layer for unit in sharded.runtime.units}
        assert layers == {"", "blocks.0", "blocks.1", "blocks.2"}
        assert sharded.runtime.units[0].groups.topology.sizes == ShardSizes(2, 2, 4)
        assert train(sharded, one) == expected


def test_without_units_and_sizes_layers_are_units_and_a_node_shares_a_copy():
    run_ranks(check_defaults, 4)


@pytest.mark.parametrize("build, expected", [
    (lambda: nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "1 3"),
    (lambda: nn.Transformer(4, 1, 2, 2, 4),
     "encoder.layers.0 encoder.layers.1 decoder.layers.0 decoder.layers.1"),
    (lambda: nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2)), ""),
])  # fmt: skip
def test_layers_are_found_in_the_outermost_lists(build, expected):
    model = build()
    names = {module: name for name, module in model.named_modules()}
    assert [names[unit] for unit in default_units(model)] == expected.split()


# ---- state dicts of the model


def check_state_dicts(folder: Path) -> None:
    torch.manual_seed(6)
    other = ToyLM().to(torch.bfloat16)
    values = {name: value.clone() for name, value in other.state_dict().items()}
    for index, sizes in enumerate(SIZES):
        with sharded_toy(sizes, build_toy(torch.bfloat16)) as sharded:
            train(sharded, one)
            with torch.no_grad():  # what was gathered for it is old after loading
                toy_loss(sharded.model, toy_batch(0, 0, 0))
            sharded.model.load_state_dict(values)
            for _ in range(2):  # the model's values, and those that are trained
                found = toy_loss(sharded.model, toy_batch(0, 0, 0))
                assert torch.equal(found, toy_loss(other, toy_batch(0, 0, 0))), sizes
                with sharded.changing_params():
                    pass
            usual_step(sharded, [toy_loss(sharded.model, toy_batch(0, 0, 0))])
            saved = sharded.model.state_dict()
            expected = params_of(sharded)
            assert saved.keys() == values.keys()
            checkpoint.save(saved, checkpoint_id=folder / str(index))
        full = {name: torch.empty_like(value) for name, value in values.items()}
        checkpoint.load(full, checkpoint_id=folder / str(index))
        assert all(torch.equal(full[name], expected[name]) for name in full), sizes


@pytest.mark.habit("`model.state_dict()`", "`model.load_state_dict(whole)`")
def test_the_state_dict_of_the_model_is_saved_in_shards_and_a_whole_one_is_loaded(tmp_path):
    run_ranks(check_state_dicts, 2, tmp_path)


# ---- what is refused


def arguments(**changes) -> Callable[[], object]:
    def call():
        model = changes.pop("model", None) or build_toy()
        usual = {"units": model.blocks, "sizes": ShardSizes(2, 2, 2), "optimizer": new_adamw}
        usual |= {key: value(model) for key, value in changes.items()}
        return shard(model, **usual)

    return call


WRONG_ARGUMENTS = {
    "a container": (arguments(units=lambda m: [m.blocks]), "units=model.blocks"),
    "another model's": (arguments(units=lambda m: [nn.Linear(2, 2)]), "not a part of the model"),
    "names": (arguments(units=lambda m: ["blocks.0"]), "'blocks.0', which is no module"),
    "classes": (arguments(units=lambda m: {type(m.norm)}), "LayerNorm, which is no module"),
    "one module": (arguments(units=lambda m: m.norm), "hand over a list"),
    "a tuple": (arguments(sizes=lambda m: (2, 2, 2)), "ShardSizes.param, grad, optim"),
    "an optimizer": (arguments(optimizer=lambda m: new_adamw(m.parameters())), "pass a function"),
    "no function": (arguments(optimizer=lambda m: "adamw"), "pass a function of this rank"),
    "nothing": (arguments(optimizer=lambda m: None), "pass a function of this rank"),
    "no optimizer": (arguments(optimizer=lambda m: lambda _: 3), "optimizer returned a int"),
    "LBFGS": (
        arguments(optimizer=lambda m: lambda ps: torch.optim.LBFGS([p for _, p in ps])), "AdamW"
    ),
    "a schedule's name": (arguments(schedule=lambda m: "inline"), "ScheduleConfig.'inline'"),
    "a mesh of two": (arguments(group=lambda m: init_device_mesh("cpu", (1, 2))), "2 dimensions"),
    "a list of ranks": (arguments(group=lambda m: [0, 1]), "a process group, a mesh"),
}  # fmt: skip


def check_wrong_arguments() -> None:
    for call, text in WRONG_ARGUMENTS.values():
        assert_refused(call, text)
    rank = dist.get_rank()
    for builds, text in (
        (lambda: ToyLM(width=16 - 8 * rank), r"\(37, 16\) on rank 0 and .*\(37, 8\) on rank 1"),
        (lambda: ToyLM(depth=3 - rank), r"blocks.2 on rank 0 and not given on rank 1"),
        (lambda: ToyLM().to(torch.float16 if rank else torch.float32), "float16 .*on rank 1"),
        (lambda: ToyLM(), "other values on rank 1 than on rank 0; seed all ranks alike"),
    ):
        torch.manual_seed(5 if "values" not in text else rank)
        assert_refused(partial(sharded_toy, (2, 2, 2), builds()), text)


@pytest.mark.habit(
    "ranks with other shapes or other values",
    "a wrong kind of `units`, `sizes`, `optimizer`, `schedule` or `group`",
)
def test_a_wrong_argument_and_different_models_are_refused_in_one_line_on_every_rank():
    run_ranks(check_wrong_arguments, 2)


WITHOUT_AN_END = """
import torch
import torch.distributed as dist
from torch import nn
from megatron_asynchzp import ShardSizes, shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
sharded = shard(model, list(model), ShardSizes(2, 2, 2), torch.optim.AdamW)
for step in range(5):
    sharded.zero_grad()
    model(torch.randn(4, 64)).sum().backward()
    sharded.step()
"""


@pytest.mark.slow  # two interpreters
@pytest.mark.habit("the process ends without `close()`")
def test_a_run_that_never_closes_what_it_opened_ends_well(tmp_path):
    (tmp_path / "run.py").write_text(WITHOUT_AN_END)
    port = free_port()
    environments = [os.environ | RankPlace(rank, 2, 2, port).environment() for rank in range(2)]
    root = str(Path(__file__).parents[3])
    processes = [
        subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path, env=env | {"PYTHONPATH": root})
        for env in environments
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


@pytest.mark.habit("`shard` before `init_process_group`")
def test_without_a_process_group_the_remedy_is_named():
    assert_refused(lambda: sharded_toy((1, 1, 1)), "init_process_group")
