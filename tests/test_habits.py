# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What people do out of habit with `shard`: it trains as in one process, or ends in one line."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron_asynchzp import ConfigurationError, ShardedModel, ShardSizes, shard
from megatron_asynchzp.library.arguments import default_units
from scripts.testbed.ranks import RankPlace, free_port, run_ranks
from tests.support.engine import build_toy
from tests.support.selection import slow_unless
from tests.support.toy_models import ToyLM, toy_batch, toy_loss

CLIP, STEPS = 0.3, 3
SIZES = (2, 2, 2), (1, 1, 2)
SIZES_OF_4 = (4, 4, 4), (2, 2, 4), (1, 2, 4), (1, 1, 1)


def new_adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sharded_toy(sizes: Sequence[int], model: nn.Module | None = None, **kwargs) -> ShardedModel:
    model = build_toy() if model is None else model
    return shard(model, model.blocks, ShardSizes(*sizes), new_adamw, **kwargs)


# ---- losses of one rank in one step, each of which is handed to backward in turn


def one(model, step, rank):
    yield toy_loss(model, toy_batch(step, 0, rank))


def several_backwards_without_a_word(model, step, rank):
    for index in range(3):
        yield toy_loss(model, toy_batch(step, index, rank)) / 3


def two_forwards_one_backward(model, step, rank):
    chosen, rejected = (toy_loss(model, toy_batch(step, index, rank)) for index in range(2))
    return [torch.nn.functional.softplus(chosen - rejected)]


def two_forwards_two_backwards(model, step, rank):
    return [toy_loss(model, toy_batch(step, index, rank)) for index in range(2)]


def a_forward_without_backward(model, step, rank):
    toy_loss(model, toy_batch(step, 5, rank))
    yield from one(model, step, rank)


def a_gradient_penalty(model, step, rank):
    noise = torch.Generator().manual_seed(step + 100 * rank)
    x = torch.randn(4, 16, generator=noise).requires_grad_()
    (grad,) = torch.autograd.grad(model.blocks[1](x).pow(2).sum(), x, create_graph=True)
    yield from one(model, step, rank)
    yield (grad.norm() - 1) ** 2 / 100


def a_loss_of_a_frozen_copy(model, step, rank):
    with torch.no_grad():
        target = toy_loss(model, toy_batch(step, 1, rank))
    for loss in one(model, step, rank):
        yield (loss - target) ** 2


Losses = Callable[[nn.Module, int, int], Iterable[torch.Tensor]]


def train_plainly(model: nn.Module, losses: Losses, num_ranks: int, clips: bool = True) -> list:
    """Losses and norms in one process, over the batches of all ranks."""
    optimizer, seen = new_adamw(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(num_ranks):
            for loss in losses(model, step, rank):
                (loss / num_ranks).backward()
                total += loss.item() / num_ranks
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP if clips else torch.inf)
        optimizer.step()
        seen.append(pytest.approx((total, norm.item() if clips else 0.0), rel=1e-6, abs=1e-7))
    return seen


Step = Callable[[ShardedModel, Iterable[torch.Tensor]], float]
"""Takes the losses of a step; returns the gradient norm where it clips."""


def usual_step(sharded: ShardedModel, losses: Iterable[torch.Tensor]) -> float:
    sharded.zero_grad()
    for loss in losses:
        loss.backward()
    norm = sharded.clip_grad_norm_(CLIP)
    sharded.step()
    return norm.item()


def train(sharded: ShardedModel, losses: Losses, take_step: Step = usual_step) -> list:
    seen = []
    for step in range(STEPS):
        total = torch.zeros(())

        def noted(step=step, total=total):
            for loss in losses(sharded.model, step, dist.get_rank()):
                total += loss.detach()
                yield loss

        norm = take_step(sharded, noted())
        dist.all_reduce(total)
        seen.append((total.item() / dist.get_world_size(), norm))
    return seen


def a_penalty_on_weights(model, step, rank):
    yield from one(model, step, rank)
    yield sum(param.square().sum() for param in model.parameters()) / 100


def build_tied() -> nn.Module:
    model = build_toy()
    model.output.weight = model.embedding.weight
    return model


def check_gradients_beside_modules() -> None:
    """Of weights that two modules share, and of weights that are always gathered."""
    for losses, all_sizes, build in (
        (several_backwards_without_a_word, SIZES, build_tied),
        (a_penalty_on_weights, [(1, 1, 2), (1, 2, 2)], build_toy),
    ):
        expected = train_plainly(build(), losses, dist.get_world_size())
        for sizes in all_sizes:
            with sharded_toy(sizes, build()) as sharded:
                assert train(sharded, losses) == expected, (losses, sizes)


def test_gradients_that_come_from_several_modules_or_from_none_are_all_reduced():
    run_ranks(check_gradients_beside_modules, 2)


def check_reductions() -> None:
    with sharded_toy((2, 2, 2)) as sharded:
        counts, units = sharded.runtime.driver.counts, len(sharded.runtime.units)
        train(sharded, two_forwards_one_backward)
        before = counts["reduce"]
        usual_step(sharded, two_forwards_one_backward(sharded.model, 0, 0))
        assert counts["reduce"] - before == units


def test_two_forwards_are_reduced_once_from_the_second_step_on():
    run_ranks(check_reductions, 2)


# ---- steps of a loop that clips, or not


def backward_all(losses: Iterable[torch.Tensor]) -> None:
    for loss in losses:
        loss.backward()


def zeroed_by(zero: Callable[[ShardedModel], object]) -> Step:
    def step(sharded, losses):
        zero(sharded)
        backward_all(losses)
        norm = sharded.clip_grad_norm_(CLIP)
        sharded.step()
        return norm.item()

    return step


def zeroed_at_the_end(sharded, losses):
    backward_all(losses)
    norm = sharded.clip_grad_norm_(CLIP)
    sharded.optimizer.step()
    sharded.optimizer.zero_grad(set_to_none=True)
    return norm.item()


def of_a_scaler(sharded, losses):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    sharded.zero_grad()
    backward_all(scaler.scale(loss) for loss in losses)
    scaler.unscale_(sharded.optimizer)
    norm = sharded.clip_grad_norm_(CLIP)
    scaler.step(sharded.optimizer)
    scaler.update()
    return norm.item()


def of_a_scaler_without_clipping(sharded, losses):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    sharded.optimizer.zero_grad()
    backward_all(scaler.scale(loss) for loss in losses)
    scaler.step(sharded.optimizer)
    scaler.update()
    return 0.0


def the_optimizer_alone(sharded, losses):
    sharded.optimizer.zero_grad()
    backward_all(losses)
    sharded.optimizer.step()
    return 0.0


def with_a_schedule_and_an_evaluation(sharded, losses):
    torch.optim.lr_scheduler.LambdaLR(sharded.optimizer, lambda _: 1.0)
    sharded.model.eval()
    with torch.inference_mode():
        toy_loss(sharded.model, toy_batch(7, 0, dist.get_rank()))
    sharded.model.train()
    return the_optimizer_alone(sharded, losses)


def moved_to_where_it_is(sharded, losses):
    sharded.model.to("cpu").float().requires_grad_(True)
    return usual_step(sharded, losses)


def params_of(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in sharded.full_params()}


# ---- models


def check_two_models(all_sizes: Sequence[Sequence[int]]) -> None:
    """A model that is trained with another one, and with one that is not."""

    def build_three() -> list[nn.Module]:
        return [build_toy(), build_toy(depth=2), build_toy(depth=1).requires_grad_(False)]

    def loss_of(models, step: int, rank: int) -> torch.Tensor:
        first, second, teacher = (toy_loss(model, toy_batch(step, 0, rank)) for model in models)
        return (
            first * second + (first - teacher) ** 2 + toy_loss(models[1], toy_batch(step, 1, rank))
        )

    world, models = dist.get_world_size(), build_three()
    optimizers = [new_adamw(model.parameters()) for model in models[:2]]
    expected = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss_of(models, step, rank) / world for rank in range(world)]
        backward_all(losses)
        for optimizer in optimizers:
            optimizer.step()
        expected.append(pytest.approx(sum(loss.item() for loss in losses), rel=1e-6))
    for sizes in all_sizes:
        models = build_three()
        all_sharded = [sharded_toy(sizes, model) for model in models]
        found = []
        for step in range(STEPS):
            for sharded in all_sharded:
                sharded.zero_grad()
            loss = loss_of(models, step, dist.get_rank())
            loss.backward()
            for sharded in all_sharded:
                sharded.step()
            total = loss.detach() / world
            dist.all_reduce(total)
            found.append(total.item())
        assert found == expected, sizes
        for sharded in all_sharded:
            sharded.close()


def check_turns(all_sizes: Sequence[Sequence[int]]) -> None:
    """A generator and its critic, each of which is trained through the other or beside it."""

    def build_both() -> list[nn.Sequential]:
        torch.manual_seed(3)
        layers = [[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)] for _ in range(2)]
        return [nn.Sequential(*each) for each in layers]

    def loss_of(models: list[nn.Sequential], turn: int, step: int, rank: int) -> torch.Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(9 * step + rank))
        made = models[0](x)
        if turn == 0:
            return models[1](made).sin().sum()
        return (models[1](made.detach()) - models[1](x)).square().sum()

    world, models = dist.get_world_size(), build_both()
    optimizers = [new_adamw(model.parameters()) for model in models]
    expected = []
    for step in range(STEPS):
        for turn in (1, 0, 1):
            optimizers[turn].zero_grad()
            losses = [loss_of(models, turn, step, rank) / world for rank in range(world)]
            backward_all(losses)
            optimizers[turn].step()
            expected.append(pytest.approx(sum(loss.item() for loss in losses), rel=1e-6))
    for sizes in all_sizes:
        models, found = build_both(), []
        both = [shard(one, list(one), ShardSizes(*sizes), new_adamw) for one in models]
        for step in range(STEPS):
            for turn in (1, 0, 1):
                both[turn].zero_grad()
                loss = loss_of(models, turn, step, dist.get_rank())
                loss.backward()
                both[turn].step()
                total = loss.detach() / world
                dist.all_reduce(total)
                found.append(total.item())
        assert found == expected, sizes
        for sharded in both:
            sharded.close()


def check_several_models(
    of_two: Sequence[Sequence[int]], of_turns: Sequence[Sequence[int]]
) -> None:
    check_two_models(of_two)
    check_turns(of_turns)


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


def check_compiled(all_sizes: Sequence[Sequence[int]]) -> None:
    def compile_before(model):
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return sharded_toy(sizes, model)

    def compile_after(model):
        sharded = sharded_toy(sizes, model)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return sharded

    expected = train_plainly(build_toy(), one, dist.get_world_size())
    for sizes in all_sizes:
        for compile_it in (compile_before, compile_after):
            with compile_it(build_toy()) as sharded:
                assert train(sharded, one) == expected, (sizes, compile_it)


@pytest.mark.parametrize(
    "world_size, all_sizes", [(2, SIZES[:1]), slow_unless(False, 4, SIZES_OF_4)]
)
@pytest.mark.habit("`torch.compile` of units, before or after `shard`")
def test_compiled_units_train_as_in_one_process(world_size, all_sizes):
    run_ranks(check_compiled, world_size, all_sizes)


def check_defaults() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    expected = train_plainly(build_toy(), one, dist.get_world_size())
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


def assert_refused(what: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        what()
    assert "\n" not in str(caught.value)


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
    "an optimizer": (arguments(optimizer=lambda m: new_adamw(m.parameters())), "hand over what"),
    "no function": (arguments(optimizer=lambda m: "adamw"), "hand over what makes it"),
    "nothing": (arguments(optimizer=lambda m: None), "hand over what makes it"),
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
    root = str(Path(__file__).parents[1])
    processes = [
        subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path, env=env | {"PYTHONPATH": root})
        for env in environments
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


@pytest.mark.habit("`shard` before `init_process_group`")
def test_without_a_process_group_the_remedy_is_named():
    assert_refused(lambda: sharded_toy((1, 1, 1)), "init_process_group")
