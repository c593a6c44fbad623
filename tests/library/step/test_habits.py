# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What people do out of habit, as docs/habits.md has it: one check for each row of that page that
no other test has, by the row's first column, and that each row of the page has a test."""

import copy
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from megatron_asynchzp import ConfigurationError, ShardedModel, ShardSizes, apply_delta, shard
from megatron_asynchzp.engine.zero import taken_grads
from scripts.testbed.ranks import RankPlace, free_port, run_ranks
from tests.support.engine import build_toy
from tests.support.loops import (
    CLIP,
    SIZES,
    SIZES_OF_4,
    STEPS,
    Sizes,
    Step,
    assert_refused,
    backward_all,
    clipped,
    new_adamw,
    one,
    optimizer_params,
    params_of,
    sharded_toy,
    stepping,
    train,
    train_plainly,
    trains_alike,
    unclipped,
    usual_step,
)
from tests.support.selection import slow_unless
from tests.support.toy_models import ToyLM, toy_batch, toy_llama_config, toy_loss

PAGE = Path(__file__).parents[3] / "docs" / "habits.md"


# ---- losses of one rank in one step, and steps of a loop


def several_backwards_without_a_word(model, step, rank):
    for index in range(3):
        yield toy_loss(model, toy_batch(step, index, rank)) / 3


def a_penalty_on_weights(model, step, rank):
    yield from one(model, step, rank)
    yield sum(param.square().sum() for param in model.parameters()) / 100


def penalised_weights(_: Sizes) -> None:
    """Which a loop may compute with where they are always gathered: no module brings gradients."""
    for sizes in ((1, 1, 2), (1, 2, 2)):
        trains_alike(sizes, losses=a_penalty_on_weights)


def build_tied() -> nn.Module:
    """Gradients of a weight come from two modules."""
    model = build_toy()
    model.output.weight = model.embedding.weight
    return model


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


# ---- what is right


def clip_values(params: Iterable[nn.Parameter]) -> float:
    nn.utils.clip_grad_value_(params, 1e-3)
    return 0.0


def reduced_once(sizes: Sizes) -> None:
    """From the second step on."""
    with sharded_toy(sizes) as sharded:
        train(sharded, two_forwards_one_backward)
        counts = sharded.runtime.driver.counts
        before = counts["reduce"]
        usual_step(sharded, two_forwards_one_backward(sharded.model, 0, 0))
        reduced = [unit for unit in sharded.runtime.units if sizes[1] > 1]
        assert counts["reduce"] - before == len(reduced)


def overflow(sizes: Sizes) -> None:
    with sharded_toy(sizes) as sharded:
        scaler, before = torch.amp.GradScaler("cpu", init_scale=8.0), params_of(sharded)
        bias = sharded.model.blocks[0].up.bias
        # An element that one rank alone has in its optimizer's part.
        overflow = bias.register_hook(lambda grad: grad.index_fill(0, torch.tensor(0), torch.inf))
        for is_skipped in (True, False):
            sharded.zero_grad()
            scaler.scale(toy_loss(sharded.model, toy_batch(0, 0, 0))).backward()
            scaler.step(sharded.optimizer)
            scaler.update()
            overflow.remove()
            assert scaler.get_scale() == 4.0
            same = [torch.equal(value, before[key]) for key, value in params_of(sharded).items()]
            assert all(same) is is_skipped, (sizes, is_skipped)


class Encoder(ToyLM):
    """With methods beside forward."""

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.encode(tokens), None)


def of_an_encoding(model, step, rank):
    encoded = model.encode(toy_batch(step, 1, rank))
    return [encoded.square().mean() / 10 + toy_loss(model, toy_batch(step, 0, rank))]


def build_encoder() -> nn.Module:
    torch.manual_seed(5)
    return Encoder()


def other_methods(sizes: Sizes) -> None:
    expected = train_plainly(build_encoder(), of_an_encoding)
    with sharded_toy(sizes, build_encoder()) as sharded:
        sharded.register_forward_method(sharded.model, "encode")
        assert train(sharded, of_an_encoding) == expected


def a_mesh_as_group(sizes: Sizes) -> None:
    with sharded_toy(sizes, group=init_device_mesh("cpu", (2,))) as sharded:
        with torch.inference_mode():  # its first gathers
            toy_loss(sharded.model, toy_batch(0, 0, 0))
        assert train(sharded, one) == train_plainly(build_toy(), one)


def nothing_trained(sizes: Sizes) -> None:
    with sharded_toy(sizes, build_toy().requires_grad_(False)) as frozen:
        expected = toy_loss(build_toy(), toy_batch(0, 0, 0))
        assert torch.equal(toy_loss(frozen.model, toy_batch(0, 0, 0)), expected)
        frozen.load_state_dict(frozen.state_dict())


def rates_that_change(sizes: Sizes) -> None:
    def with_schedule(named):
        optimizer = new_adamw(named)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    trains_alike(sizes, new_optimizer=with_schedule)


def rates_as_tensors(sizes: Sizes) -> None:
    rate = partial(torch.optim.AdamW, weight_decay=0.1)
    trains_alike(sizes, new_optimizer=partial(rate, lr=torch.tensor(1e-2)))
    trains_alike(sizes, new_optimizer=partial(rate, lr=1e-2, fused=True))


def groups_by_name(sizes: Sizes) -> None:
    def new(named):
        biases = [pair for pair in named if "bias" in pair[0]]
        rest = [pair for pair in named if "bias" not in pair[0]]
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    trains_alike(sizes, new_optimizer=new)


class Both(torch.optim.Optimizer):
    """Two optimizers, which a loop steps as one."""

    is_elementwise = True

    def __init__(self, named):
        norms = [param for name, param in named if "norm" in name]
        rest = [param for name, param in named if "norm" not in name]
        self.both = [torch.optim.AdamW(rest, lr=1e-2), torch.optim.SGD(norms, lr=1e-2)]
        super().__init__([*norms, *rest], {})

    def step(self, closure=None):
        for optimizer in self.both:
            optimizer.step()


def an_optimizer_of_some(sizes: Sizes) -> None:
    def new(named):
        return torch.optim.AdamW([pair for pair in named if "norm" in pair[0]], lr=1e-2)

    trains_alike(sizes, new_optimizer=new)


def micro_batches(model, step, rank):
    for index in range(3):
        is_last = index == 2 or not hasattr(model, "no_sync")
        with nullcontext() if is_last else model.no_sync():
            yield toy_loss(model, toy_batch(step, index, rank)) / 3


def no_backward(sizes: Sizes) -> None:
    with sharded_toy(sizes) as sharded:
        if max(sizes[:2]) < dist.get_world_size():  # other ranks might have had one
            assert_refused(sharded.step, "has had no micro-batch yet")
            usual_step(sharded, [0 * toy_loss(sharded.model, toy_batch(0, 0, 0))])
        before = params_of(sharded)
        sharded.zero_grad()
        sharded.step()
        for name, value in params_of(sharded).items():
            assert torch.equal(value, before[name]), name


def twice_through_a_graph(sizes: Sizes) -> None:
    def halves(model, step, rank):
        loss = toy_loss(model, toy_batch(step, 0, rank))
        (loss / 2 / (1 if hasattr(model, "no_sync") else 2)).backward(retain_graph=True)
        yield loss / 2

    trains_alike(sizes, losses=halves)


def a_graph_that_is_gone(sizes: Sizes) -> None:
    with sharded_toy(sizes) as sharded:
        loss = toy_loss(sharded.model, toy_batch(0, 0, 0))
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second"):
            loss.backward()


def a_graph_of_before(sizes: Sizes) -> None:
    """It needs the weights of before; a checkpoint computes again with those of now, as torch's."""

    def change(sharded: ShardedModel) -> None:
        with sharded.changing_params(), torch.no_grad():
            for param in optimizer_params(sharded):
                param.mul_(0.5)

    def step(sharded: ShardedModel) -> None:
        toy_loss(sharded.model, toy_batch(0, 1, 0)).backward()
        sharded.step()

    for update in (step, change, lambda sharded: sharded.load_state_dict(sharded.state_dict())):
        sharded = sharded_toy(sizes)
        x = torch.ones(2, 16, requires_grad=True)
        again = checkpoint(sharded.model.blocks[1], x, use_reentrant=False)
        loss = toy_loss(sharded.model, toy_batch(0, 0, 0))
        update(sharded)
        again.sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        sharded.runtime.driver.close()


def caught_errors(sizes: Sizes) -> None:
    for error in (ValueError, KeyboardInterrupt):

        def fails(*_, error=error):
            raise error

        def interrupted(model, fails=fails, error=error):
            for hook_on in ("register_forward_pre_hook", "register_full_backward_hook"):
                handle = getattr(model.blocks[1].up, hook_on)(fails)
                with pytest.raises(error):
                    toy_loss(model, toy_batch(0, 0, 0)).backward()
                handle.remove()

        trains_alike(sizes, after=interrupted)


def rounded_losses(model, step, rank):
    with torch.autocast("cpu", torch.bfloat16):
        yield toy_loss(model, toy_batch(step, 0, rank))


def watched_losses(model, step, rank):
    with torch.autograd.set_detect_anomaly(True):
        yield from one(model, step, rank)


def of_nothing_on_one_rank(model, step, rank):
    tokens = toy_batch(step, 0, rank)[: 0 if rank else None]
    yield model(tokens).square().sum() / 100


def build_with_dropout() -> nn.Module:
    model = build_toy()
    model.blocks[1].down = nn.Sequential(model.blocks[1].down, nn.Dropout(0.3))
    return model


def seeded_losses(model, step, rank):
    torch.manual_seed(100 * step + rank)
    yield from one(model, step, rank)


def hook_modules(model: nn.Module) -> None:
    first, second, third = model.blocks
    first.register_forward_hook(lambda module, args, output: output * 1.5)
    second.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    second.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.7,))
    third.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 2,))


def build_hooked() -> nn.Module:
    model = build_toy()
    hook_modules(model)
    return model


def hooked_modules(sizes: Sizes) -> None:
    trains_alike(sizes, build_hooked)
    trains_alike(sizes, after=hook_modules)


def masked_grads(sizes: Sizes) -> None:
    """Also where the engine takes a gradient as soon as it is there; set before `shard` too."""

    def mask(param: nn.Parameter) -> None:
        if param.grad is not None:
            param.grad.view(-1)[:3] = 0

    def mask_all(model: nn.Module) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(mask)

    def build() -> nn.Module:
        model = build_toy()
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(mask)
        return model

    for large in (0, 2**20):
        with patch.object(taken_grads, "LARGE_GRAD_NBYTES", large):
            trains_alike(sizes, build, after=mask_all)


def changed_grads(sizes: Sizes) -> None:
    def double(sharded):
        for param in optimizer_params(sharded):
            assert param.grad is not None
            param.grad = param.grad * 2

    def twice(model, step, rank):
        for loss in one(model, step, rank):
            (loss / 2).backward(retain_graph=True)  # of 2 ranks
            yield loss

    with sharded_toy(sizes) as sharded:
        assert train(sharded, one, stepping(between=double)) == train_plainly(build_toy(), twice)


class Adapted(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(4, base.in_features) / 10)
        self.up = nn.Parameter(torch.randn(base.out_features, 4) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def build_adapted() -> nn.Module:
    model = build_toy().requires_grad_(False)
    torch.manual_seed(3)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


def build_normed() -> nn.Module:
    model = build_toy()
    nn.utils.parametrizations.weight_norm(model.blocks[1].up)
    nn.utils.parametrizations.orthogonal(model.blocks[2].up)
    return model


def build_recomputing() -> nn.Module:
    model = build_toy()
    model.recompute = True
    return model


class Transposed(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


def build_with_batch_norm() -> nn.Module:
    model = build_toy()
    model.blocks[1].norm = Transposed(16)
    return model


def late_buffer(sizes: Sizes) -> None:
    with sharded_toy(sizes) as sharded:
        sharded.model.register_buffer("late", torch.ones(3))
        assert "model.late" in sharded.state_dict()
        usual_step(sharded, one(sharded.model, 0, 0))


def questions(sizes: Sizes) -> None:
    plain = build_toy()
    with sharded_toy(sizes) as sharded:
        for (name, param), own in zip(
            sharded.model.named_parameters(), plain.parameters(), strict=True
        ):
            for asked in ("shape", "dtype", "device", "ndim", "nbytes", "is_cuda", "is_sparse"):
                assert getattr(param, asked) == getattr(own, asked), (name, asked)
            for asked in ("numel", "size", "dim", "element_size", "is_floating_point"):
                assert getattr(param, asked)() == getattr(own, asked)(), (name, asked)
            assert param.is_contiguous() and len(param) == len(own) and param in {param}
        assert "ToyLM" in repr(sharded.model)
        for shown in (str(param), f"{param}", repr(param)):
            assert ("in shards" in shown) is (sizes[0] > 1)


def generation(sizes: Sizes) -> None:
    plain, prompt = build_toy(), toy_batch(0, 0, 0)[:, :3]
    with sharded_toy(sizes) as sharded:
        for mode in (torch.no_grad, torch.inference_mode):
            texts = [prompt, prompt]
            for _ in range(4):
                with mode():
                    texts = [
                        torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
                        for text, model in zip(texts, (sharded.model, plain), strict=True)
                    ]
            assert torch.equal(*texts)
        assert train(sharded, one) == train_plainly(plain, one)


def some_values(sizes: Sizes) -> None:
    values = {"norm.weight": torch.full((16,), 3.0)}
    with sharded_toy(sizes) as sharded:
        result = sharded.model.load_state_dict(values, strict=False)
        assert len(result.missing_keys) == 21 and not result.unexpected_keys
        with sharded.changing_params():  # the main parameters have them too
            pass
        expected = build_toy().state_dict() | values
        found = params_of(sharded)
        assert all(torch.equal(found[name], expected[name]) for name in found)
        for wrong in ({"norm.weight": torch.ones(3)}, {"norm.width": torch.ones(16)}, {}):
            with pytest.raises(RuntimeError, match="loading state_dict for ToyLM"):
                sharded.model.load_state_dict(wrong)


def values_by_torch(sizes: Sizes) -> None:
    values = {name: value + 1 for name, value in build_toy().state_dict().items()}
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for options, mine in ((None, values), (whole, {} if dist.get_rank() else values)):
        with sharded_toy(sizes) as sharded:
            set_model_state_dict(sharded.model, mine, options=options)
            found = params_of(sharded)
            assert all(torch.equal(found[name], values[name]) for name in found)


def own_optimizer_state(sizes: Sizes) -> None:
    with sharded_toy(sizes) as first, sharded_toy(sizes) as second:
        train(first, one)
        second.model.load_state_dict(params_of(first))
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        norms = [usual_step(each, one(each.model, 5, 0)) for each in (first, second)]
        assert norms[0] == norms[1]
        pairs = zip(params_of(first).items(), params_of(second).values(), strict=True)
        assert [name for (name, one), other in pairs if not torch.equal(one, other)] == []


def saved_before_the_first_step(sharded, losses):
    sharded.zero_grad()
    backward_all(losses)
    sharded.state_dict()
    norm = sharded.clip_grad_norm_(CLIP)
    sharded.state_dict()
    sharded.step()
    return norm.item()


def left_early(sizes: Sizes) -> None:
    with sharded_toy(sizes) as sharded:
        for _ in sharded.full_params():
            break
        assert train(sharded, one) == train_plainly(build_toy(), one)


def rolled_out(sizes: Sizes) -> None:
    with sharded_toy(sizes) as sharded:
        copy = {name: value.clone() for name, value in sharded.stream_weights()}
        sharded.mark_weights("copy")
        assert train(sharded, one) == train_plainly(build_toy(), one)
        for delta in sharded.stream_changes("copy"):
            apply_delta(copy, delta)
        for name, value in sharded.full_params():
            assert torch.equal(copy[name], value)


class Writing(ToyLM):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.norm.weight.mul_(1.5)
        return super().forward(tokens)


def written_in_forward(sizes: Sizes) -> None:
    for model in (Writing(), ToyLM()):
        model.embedding.max_norm = 0.5 if type(model) is ToyLM else None
        model.load_state_dict(build_toy().state_dict())
        sharded = sharded_toy(sizes, model)
        assert_refused(partial(usual_step, sharded, one(model, 0, 0)), "written to")


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return toy_batch(0, 0, 0)[index]


def loaded_by_workers(model, step, rank):
    loader = torch.utils.data.DataLoader(
        Tokens(), batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    for tokens in loader:
        yield toy_loss(model, tokens)


Check = Callable[[Sizes], None]


def losses_of(*losses: Callable) -> list[Check]:
    return [partial(trains_alike, losses=one) for one in losses]


def steps_of(*steps: Step, clip: Callable = clipped) -> list[Check]:
    return [partial(trains_alike, step=step, clip=clip) for step in steps]


# The commonest, which are fast with all sizes.
CORE: dict[str, Check | list[Check]] = {
    "several backwards in a step": [
        *losses_of(
            several_backwards_without_a_word, two_forwards_two_backwards, a_loss_of_a_frozen_copy
        ),
        partial(trains_alike, build=build_tied, losses=several_backwards_without_a_word),
        penalised_weights,
    ],
    "two forwards and one backward": [*losses_of(two_forwards_one_backward), reduced_once],
    "a gradient penalty": losses_of(a_gradient_penalty),
    "a forward whose backward never comes": losses_of(a_forward_without_backward),
    "`optimizer.zero_grad()`, `model.zero_grad()`": steps_of(
        stepping(lambda s: s.optimizer.zero_grad()),
        stepping(lambda s: s.optimizer.zero_grad(False)),
        stepping(lambda s: s.model.zero_grad(set_to_none=True)),
        zeroed_at_the_end,
    ),
    "`optimizer.step()`": steps_of(the_optimizer_alone, clip=unclipped),
    "`torch.amp.GradScaler` on `sharded.optimizer`": [
        *steps_of(of_a_scaler),
        *steps_of(of_a_scaler_without_clipping, clip=unclipped),
    ],
    "`model.eval()` and an evaluation before the first step or between steps": steps_of(
        with_a_schedule_and_an_evaluation, clip=unclipped
    ),
    "`model.to()`, `.float()` that change nothing": steps_of(moved_to_where_it_is),
    "no `zero_grad` at all": partial(
        trains_alike, step=stepping(lambda s: None, clips=False), clip=unclipped, zeroes=False
    ),
    "a gradient that overflows on one rank, with a `GradScaler`": overflow,
    "`model.encode(x)`, `model.forward(x)`": other_methods,
    "a `DeviceMesh` of one dimension as `group`": a_mesh_as_group,
    "a model without trained parameters": nothing_trained,
}
RIGHT: dict[str, Check | list[Check]] = CORE | {
    "a scheduler that writes `lr`": rates_that_change,
    "`lr` as a tensor, `fused=True`": rates_as_tensors,
    "parameter groups by name": groups_by_name,
    "two optimizers in one class": partial(trains_alike, new_optimizer=Both),
    "an optimizer of some of the parameters": an_optimizer_of_some,
    "`model.no_sync()`": partial(trains_alike, losses=micro_batches),
    "`set_is_last_micro_batch(True)` forgotten": partial(
        trains_alike, step=stepping(lambda s: (s.zero_grad(), s.set_is_last_micro_batch(False)))
    ),
    "a step without a backward": no_backward,
    "`retain_graph=True`, and backward again": twice_through_a_graph,
    "backward again without it": a_graph_that_is_gone,
    "backward, after `step()`, of a forward that came before it": a_graph_of_before,
    "an error or Ctrl-C in a forward or backward, caught on all ranks": caught_errors,
    "`torch.autocast`": partial(trains_alike, losses=rounded_losses),
    "`detect_anomaly`": partial(trains_alike, losses=watched_losses),
    "`torch.utils.checkpoint`": partial(trains_alike, build=build_recomputing),
    "an empty batch on one rank": partial(trains_alike, losses=of_nothing_on_one_rank),
    "dropout after `torch.manual_seed`": partial(
        trains_alike, build=build_with_dropout, losses=seeded_losses
    ),
    "hooks of modules, set before or after `shard`": hooked_modules,
    "`param.register_hook`": partial(
        trains_alike,
        after=lambda model: model.blocks[1].up.weight.register_hook(lambda grad: grad * 2),
    ),
    "`param.register_post_accumulate_grad_hook`": masked_grads,
    "reading or replacing `.grad` of `sharded.optimizer`'s parameters": changed_grads,
    "`clip_grad_value_`": partial(
        trains_alike,
        step=stepping(between=lambda s: clip_values(optimizer_params(s)), clips=False),
        clip=clip_values,
    ),
    "adapters (LoRA) in a frozen model": partial(trains_alike, build=build_adapted),
    "`weight_norm`, `orthogonal` before `shard`": partial(trains_alike, build=build_normed),
    "`BatchNorm`": partial(trains_alike, build=build_with_batch_norm),
    "a buffer that is added later": late_buffer,
    "`numel()`, `shape`, `device`, `dtype` of parameters, `print(model)`": questions,
    "generating under `no_grad` or `inference_mode`": generation,
    "`load_state_dict(strict=False)`, wrong names or shapes": some_values,
    "`set_model_state_dict`": values_by_torch,
    "`optimizer.state_dict()` of this rank and back": own_optimizer_state,
    "`sharded.state_dict()` between backward and step": partial(
        trains_alike, step=saved_before_the_first_step
    ),
    "leaving `full_params()` early": left_early,
    "weights for rollouts, all or what changed": rolled_out,
    "a `DataLoader` with workers": partial(trains_alike, losses=loaded_by_workers),
    "writing to a weight in a forward or between steps, `nn.Embedding(max_norm=...)`": (
        written_in_forward
    ),
}


# ---- what is refused


def set_grads(to: torch.Tensor | None, of: Callable[[ShardedModel], Iterable[nn.Parameter]]):
    def check(sharded: ShardedModel) -> None:
        for param in of(sharded):
            param.grad = to

    return check


def then_trains(change: Callable[[nn.Module], object]):
    """What is refused in the step after a change of the model."""

    def check(sharded: ShardedModel) -> None:
        with torch.no_grad():
            change(sharded.model)
        usual_step(sharded, one(sharded.model, 0, 0))

    return check


def clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-0.01, 0.01)


def initialize(model: nn.Module) -> None:
    model.apply(lambda one: one.reset_parameters() if isinstance(one, nn.LayerNorm) else None)


def model_params(sharded: ShardedModel) -> Iterable[nn.Parameter]:
    return sharded.model.parameters()


def step_in_hooks(sharded: ShardedModel) -> None:
    for param in sharded.model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    backward_all(one(sharded.model, 0, 0))


def state_of_another_rank(sharded: ShardedModel) -> None:
    usual_step(sharded, one(sharded.model, 0, 0))
    all_states: list = [None, None]
    dist.all_gather_object(all_states, sharded.optimizer.state_dict())
    sharded.optimizer.load_state_dict(all_states[1 - dist.get_rank()])


def optimizer_and_model(sharded: ShardedModel) -> None:
    usual_step(sharded, one(sharded.model, 0, 0))
    get_state_dict(sharded.model, sharded.optimizer)


def read_data(sharded: ShardedModel) -> None:
    for param in sharded.model.parameters():
        param.data.mul_(0.5)


def own_optimizer(sharded: ShardedModel) -> None:
    optimizer = new_adamw(sharded.model.parameters())
    backward_all(one(sharded.model, 0, 0))
    optimizer.step()


def torch_clips(of: Callable[[ShardedModel], Iterable[torch.Tensor]]):
    def check(sharded: ShardedModel) -> None:
        backward_all(one(sharded.model, 0, 0))
        nn.utils.clip_grad_norm_(of(sharded), CLIP)

    return check


def write_whole(sharded: ShardedModel) -> None:
    with torch.no_grad():
        for _, value in sharded.full_params():
            value.mul_(2)


def gather_state_dict(sharded: ShardedModel) -> None:
    full = StateDictOptions(full_state_dict=True)
    for value in get_model_state_dict(sharded.model, options=full).values():
        value.clone()


Refusal = tuple[Callable[[ShardedModel], object], str]
# For accelerate's and a Trainer's user too: neither wrote DistributedDataParallel.
LEFT_OUT = (
    r"leave out DistributedData.*prepare\(\) the optimizer.*in place of a Trainer.*library\.md"
)
REFUSED: dict[str, list[Refusal]] = {
    "`torch.nn.utils.clip_grad_norm_`": [
        (torch_clips(model_params), "sharded.clip_grad_norm_"),
        (torch_clips(optimizer_params), "sharded.clip_grad_norm_"),
    ],
    "an optimizer of `model.parameters()`": [
        (own_optimizer, "embedding.weight: .*step sharded.optimizer")
    ],
    "LBFGS, a closure": [(lambda s: s.optimizer.step(lambda: 0.0), "takes no closure")],
    "`param.grad`, `param.norm()` between steps": [
        (lambda s: next(s.model.parameters()).grad, "gradients of a sharded model")
    ],
    "writing to a weight in a forward or between steps, `nn.Embedding(max_norm=...)`": [
        (then_trains(clamp), "embedding.weight (was written to|is in shards)"),
        (write_whole, "was written to, which is lost"),
    ],
    "a layer that is added, a weight that is replaced later": [
        (then_trains(lambda m: setattr(m, "extra", nn.Linear(2, 2))), "extra.weight was added"),
        (
            then_trains(lambda m: setattr(m.norm, "weight", nn.Parameter(torch.ones(16)))),
            "norm.weight was added or replaced",
        ),
    ],
    "sharding twice, `DistributedDataParallel` around it": [
        (lambda s: sharded_toy((2, 2, 2), s.model), "is sharded already"),
        (lambda s: nn.parallel.DistributedDataParallel(s.model), LEFT_OUT),
    ],
    "`AveragedModel`, `copy.deepcopy(model)`, `torch.save(model)`": [
        (lambda s: AveragedModel(s.model), "cannot be copied"),
        (lambda s: copy.deepcopy(s.model), "cannot be copied or pickled"),
        (lambda s: torch.save(s.model, "/dev/null"), "sharded.state_dict"),
    ],
    "`param.grad = None`, `param.grad = ...`": [
        (set_grads(None, model_params), "forget them all with zero_grad"),
        (set_grads(torch.ones(37, 16), model_params), "set those of sharded.optimizer"),
        (set_grads(None, optimizer_params), "Call zero_grad"),
    ],
    "a step of an optimizer in a hook of a parameter": [
        (step_in_hooks, "an optimizer of model.parameters")
    ],
    "`add_param_group`": [
        (lambda s: s.optimizer.add_param_group({"params": []}), "make all groups in the function")
    ],
    "`weight_norm` after `shard`": [
        (
            then_trains(lambda m: nn.utils.parametrizations.weight_norm(m.blocks[1].up)),
            "parametrize (before shard|the model, then shard)",
        )
    ],
    "`param.data`": [(read_data, "what is written to param.data is lost")],
    "a layer that is removed, weights that are tied later": [
        (then_trains(lambda m: m.blocks.pop(2)), "blocks.2.norm.weight was removed"),
        (
            then_trains(lambda m: setattr(m.output, "weight", m.embedding.weight)),
            "output.weight was removed from the model, or tied",
        ),
    ],
    "weights that are initialized after `shard`": [
        (then_trains(initialize), "norm.weight (was written to|is in shards)")
    ],
    "`load_state_dict(assign=True)`": [
        (
            then_trains(lambda m: m.load_state_dict(build_toy().state_dict(), assign=True)),
            "embedding.weight was added or replaced",
        )
    ],
    "`requires_grad_()` after `shard`": [
        (then_trains(lambda m: m.norm.requires_grad_(False)), "norm.weight: requires_grad is False")
    ],
    "`model.half()`, `.to(torch.bfloat16)` after `shard`": [
        (lambda s: s.model.half(), "convert or move the model before shard"),
        (lambda s: s.model.to(torch.bfloat16), "convert or move the model before shard"),
        (lambda s: s.model.bfloat16(), "convert or move the model before shard"),
        (lambda s: s.model.blocks[0].double(), "convert or move the model before shard"),
    ],
    "`fully_shard` after `shard`": [(then_trains(fully_shard), "leave out FSDP|without FSDP")],
    "`optimizer.state_dict()` of another rank or system": [
        (state_of_another_rank, "of another rank or other sizes"),
        (
            lambda s: s.optimizer.load_state_dict(new_adamw(build_toy().parameters()).state_dict()),
            "of a model that is not sharded",
        ),
    ],
    "`get_optimizer_state_dict`, `get_state_dict`": [
        (lambda s: get_optimizer_state_dict(s.model, s.optimizer), "sharded.state_dict"),
        (optimizer_and_model, "sharded.state_dict.., which has model and optimizer"),
    ],
    "`torch.save(optimizer)`, a copy of it": [
        (lambda s: torch.save(s.optimizer, "/dev/null"), "cannot be copied or pickled"),
        (lambda s: copy.deepcopy(s.optimizer), "cannot be copied or pickled"),
    ],
    "`torch.save(sharded.state_dict())`": [
        (lambda s: torch.save(s.state_dict(), "/dev/null"), "sharded.full_params")
    ],
    "a state dict of another kind in `sharded.load_state_dict`": [
        (lambda s: s.load_state_dict(build_toy().state_dict()), "sharded.model.load_state_dict")
    ],
    "`sharded(x)`": [(lambda s: s(toy_batch(0, 0, 0)), r"call the model that was sharded")],
}
REFUSED_IN_SHARDS: dict[str, list[Refusal]] = {
    "`param.grad`, `param.norm()` between steps": [
        (lambda s: next(s.model.parameters()).norm(), "full_params.. has whole values")
    ],
    "`model.encode(x)`, `model.forward(x)`": [
        (lambda s: s.model.forward(toy_batch(0, 0, 0)), "not model.forward")
    ],
    "`get_model_state_dict(full_state_dict=True)`": [
        (gather_state_dict, "sharded.full_params"),
        (lambda s: torch.save(s.model.state_dict(), "/dev/null"), "sharded.full_params"),
    ],
    "`torch.autograd.grad` of parameters, `backward(inputs=...)`": [
        (
            lambda s: torch.autograd.grad(
                toy_loss(s.model, toy_batch(0, 0, 0)), list(s.model.parameters())
            ),
            "come from loss.backward",
        ),
        (
            lambda s: toy_loss(s.model, toy_batch(0, 0, 0)).backward(inputs=[s.model.norm.weight]),
            "come from loss.backward",
        ),
    ],
    "`dict(sharded.full_params())`": [
        (lambda s: dict(s.full_params())["norm.weight"].sum(), "before the next unit is taken")
    ],
}


def wrong_wrappers_and_optimizers() -> None:
    """What `shard` itself refuses."""

    def sharded_with(new_optimizer: Callable) -> None:
        model = build_toy()
        shard(model, model.blocks, ShardSizes(2, 2, 2), new_optimizer)

    extra = ("temperature", nn.Parameter(torch.ones(1)))
    handed = "parameters that shard.. did not hand over"
    assert_refused(lambda: sharded_with(lambda named: new_adamw([*named, extra])), handed)
    own = build_toy()
    assert_refused(lambda: sharded_with(lambda named: new_adamw(own.parameters())), handed)
    two = "optimizer returned a list"
    assert_refused(lambda: sharded_with(lambda n: [new_adamw(n[:3]), new_adamw(n[3:])]), two)
    replicated = nn.parallel.DistributedDataParallel(build_toy())
    assert_refused(
        lambda: shard(replicated, replicated.module.blocks, ShardSizes(2, 2, 2), new_adamw),
        "is a DistributedDataParallel, which reduces gradients itself",
    )


AT_START = ("parameters of one's own in the optimizer", "a list of optimizers")


def check_right(all_sizes: Iterable[Sizes], rows: Iterable[str]) -> None:
    for sizes in all_sizes:
        for row in rows:
            checks = RIGHT[row] if isinstance(RIGHT[row], list) else [RIGHT[row]]
            for check in checks:
                try:
                    check(sizes)
                except Exception as error:
                    raise AssertionError(f"{row}, sizes {sizes}") from error


# What they exercise another row does too, or another fast test.
SELDOM = {
    "a model without trained parameters",
    "`model.to()`, `.float()` that change nothing",
    "`lr` as a tensor, `fused=True`",
    "parameter groups by name",
    "two optimizers in one class",
    "`model.no_sync()`",
    "`torch.autocast`",
    "`detect_anomaly`",
    "an empty batch on one rank",
    "dropout after `torch.manual_seed`",
    "`clip_grad_value_`",
    "adapters (LoRA) in a frozen model",
    "`weight_norm`, `orthogonal` before `shard`",
    "`BatchNorm`",
    "`optimizer.state_dict()` of this rank and back",
    "weights for rollouts, all or what changed",
    "a `DataLoader` with workers",
}


def writes_of_the_same_values_where_parameters_are_always_gathered() -> None:
    """They are named before anything is computed, and not as written in a forward."""

    def train(sharded: ShardedModel) -> None:
        usual_step(sharded, one(sharded.model, 0, 0))

    def evaluate(sharded: ShardedModel) -> None:
        with torch.no_grad():
            toy_loss(sharded.model, toy_batch(0, 0, 0))

    for use in (train, evaluate, lambda sharded: list(sharded.stream_weights())):
        sharded = sharded_toy((1, 1, 2))
        with torch.no_grad():
            initialize(sharded.model)
        assert_refused(partial(use, sharded), "norm.weight was written to, which is lost")
        with suppress(ConfigurationError):  # of what ended the step
            sharded.runtime.driver.close()


def check_all(all_sizes: Iterable[Sizes], rows: Sequence[str]) -> None:
    check_right(all_sizes, rows)
    for sizes in all_sizes:
        refused = [*REFUSED.values(), *(REFUSED_IN_SHARDS.values() if sizes[0] > 1 else ())]
        for what, text in (pair for pairs in refused for pair in pairs):
            sharded = sharded_toy(sizes)
            assert_refused(partial(what, sharded), text)
            with suppress(ConfigurationError):  # of what ended the step
                sharded.runtime.driver.close()
        with pytest.raises(ConfigurationError, match="keep it as long as the model is trained"):
            sharded_toy(sizes).optimizer.zero_grad()
        with pytest.raises(AttributeError, match="the model has it: sharded.model.parameters"):
            sharded_toy(sizes).parameters()
    with sharded_toy((2, 2, 2)) as sharded:
        pass  # it is closed now
    with pytest.raises(RuntimeError, match="Use the model before its close"):
        usual_step(sharded, one(sharded.model, 0, 0))
    writes_of_the_same_values_where_parameters_are_always_gathered()
    wrong_wrappers_and_optimizers()


@pytest.mark.parametrize(
    "all_sizes, rows",
    [(SIZES[:1], sorted(RIGHT.keys() - SELDOM)), slow_unless(False, SIZES, list(RIGHT))],
    ids=["some", "all"],
)
@pytest.mark.habit(*{**RIGHT, **REFUSED, **REFUSED_IN_SHARDS}, *AT_START)
@pytest.mark.habit("`shard(DistributedDataParallel(model))`", "using a model after `close()`")
@pytest.mark.habit("dropping what `shard` returned", "`sharded.parameters()`, `sharded.train()`")
def test_habits_train_as_in_one_process_or_are_refused_in_one_line(all_sizes, rows):
    run_ranks(check_all, 2, all_sizes, rows)


def test_the_commonest_habits_train_as_in_one_process_where_parameters_stay_whole_too():
    run_ranks(check_right, 2, SIZES[1:], list(CORE))


@pytest.mark.slow  # fast above, on two ranks
def test_two_forwards_and_one_backward_train_as_in_one_process_for_every_kind_of_sizes():
    rows = ["two forwards and one backward", "a gradient penalty"]
    run_ranks(check_right, 4, SIZES_OF_4, rows)


# ---- accelerate and transformers


def new_llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(toy_llama_config())


def check_accelerate(folder: Path) -> None:
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    def halves(model, step, rank):
        for index in range(2):
            yield toy_loss(model, toy_batch(step, index, rank)) / 2

    expected = train_plainly(build_toy(), halves)
    for sizes in SIZES:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        with sharded_toy(sizes) as sharded:
            optimizer = accelerator.prepare(sharded.optimizer)
            for step in range(STEPS):
                total, norm = torch.zeros(()), 0.0
                for index in range(2):
                    with accelerator.accumulate(sharded.model):
                        loss = toy_loss(sharded.model, toy_batch(step, index, dist.get_rank()))
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            norm = sharded.clip_grad_norm_(CLIP).item()
                        optimizer.step()
                        optimizer.zero_grad()
                    total += loss.detach() / 4
                dist.all_reduce(total)
                assert (total.item(), norm) == expected[step], (sizes, step)
            assert_refused(partial(accelerator.prepare, sharded.model), LEFT_OUT)
        check_llama(sizes, folder / str(sizes[0]))
    model = new_llama()
    sharded = shard(model, model.model.layers, ShardSizes(2, 2, 2), new_adamw)
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], max_steps=1)
    rows = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 16
    optimizers = (sharded.optimizer, torch.optim.lr_scheduler.LambdaLR(sharded.optimizer, float))
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=optimizers)
    assert_refused(trainer.train, LEFT_OUT)


def check_llama(sizes: Sizes, folder: Path) -> None:
    model, plain = new_llama(), new_llama()
    prompt = torch.arange(5)[None]
    with shard(model, model.model.layers, ShardSizes(*sizes), new_adamw) as sharded:
        texts = [
            each.generate(prompt, max_new_tokens=4, do_sample=False) for each in (model, plain)
        ]
        assert torch.equal(*texts)
        if sizes[0] > 1:
            assert_refused(lambda: model.save_pretrained(folder), "sharded.full_params")
        model.save_pretrained(folder, state_dict=params_of(sharded))
    dist.barrier()  # the first rank writes it
    loaded = type(model).from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in plain.state_dict().items())


@pytest.mark.slow
@pytest.mark.habit(
    "`accelerator.prepare(sharded.optimizer)`, `accumulate(model)`",
    "`accelerator.prepare(model)`, `Trainer(model)`",
    "`model.save_pretrained(folder)`",
    "`model.generate()`",
)
def test_accelerate_and_transformers_work_with_a_sharded_model_or_are_refused(tmp_path):
    run_ranks(check_accelerate, 2, tmp_path)


@pytest.mark.slow
def test_the_example_with_accelerate_runs_as_it_stands(tmp_path):
    page = (PAGE.parent / "library.md").read_text()
    section = page.split("## With accelerate and transformers\n")[1]
    (tmp_path / "example.py").write_text(section.split("```python\n")[1].split("```")[0])
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "example.py"],
            cwd=tmp_path,
            env=os.environ
            | RankPlace(rank, 2, 2, port).environment()
            | {"PYTHONPATH": str(PAGE.parents[1]), "ACCELERATE_USE_CPU": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended[0][1][-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+),", ended[0][0])]
    assert len(losses) == 2 and (tmp_path / "trained" / "model.safetensors").exists()


def autoencoder_of_the_page(batches: list[torch.Tensor]) -> type[nn.Module]:
    """Runs the page's example, and returns its model's class."""
    section = (PAGE.parent / "library.md").read_text().split("## Modules called in parts\n")[1]
    example = section.split("```python\n")[1].split("```")[0]
    known = {"torch": torch, "nn": nn, "shard": shard, "ShardSizes": ShardSizes}
    exec(example, known | (made := {"batches": batches}), made)
    assert made["latents"][0].requires_grad
    made["sharded"].close()
    return made["Autoencoder"]


def images(step: int, rank: int) -> list[torch.Tensor]:
    drawn = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(9 * step + rank))
    return [*drawn]


def decoded(model, latent, x):
    return (model.decode(latent) - x).square().mean()


def all_encoded_first(model, step, rank):
    batches = images(step, rank)
    latents = [model.encode(x) for x in batches]
    for latent, x in zip(latents, batches, strict=True):
        yield decoded(model, latent, x)


def encoded_without_gradients(model, step, rank):
    for x in images(step, rank):
        with torch.no_grad():
            latent = model.encode(x)
        yield decoded(model, latent, x)


def called_by_unit_and_by_method(model, step, rank):
    for x in images(step, rank):
        yield decoded(model, model.blocks[1](model.blocks[0](x)), x) + model.encode(x).var()


def train_in_parts() -> None:
    made = autoencoder_of_the_page(images(0, dist.get_rank()))

    def build() -> nn.Module:
        torch.manual_seed(3)
        return made()

    ways = all_encoded_first, encoded_without_gradients, called_by_unit_and_by_method
    for way, sizes in zip(ways, ((2, 2, 2), (1, 2, 2), (2, 2, 2)), strict=True):
        with sharded_toy(sizes, build()) as sharded:
            for name in ("encode", "decode"):
                sharded.register_forward_method(sharded.model, name)
            assert train(sharded, way) == train_plainly(build(), way)


@pytest.mark.slow
def test_a_module_that_is_called_in_parts_trains_as_in_one_process_and_the_example_runs():
    run_ranks(train_in_parts, 2)


# ---- the page


def rows_of_the_page() -> list[str]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [
        line.split(" | ")[0].removeprefix("| ")
        for line in lines
        if not line.startswith("| habit |")
    ]


def test_each_row_of_the_page_of_habits_has_a_test_and_there_are_60():
    tested: list[str] = []
    for file in Path(__file__).parents[1].glob("*/test_*.py"):
        module = import_module(f"tests.library.{file.parent.name}.{file.stem}")
        for _, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__:
                marks = [m for m in getattr(function, "pytestmark", []) if m.name == "habit"]
                tested += [row for mark in marks for row in mark.args]
    rows = rows_of_the_page()
    assert len(rows) >= 60 and len(set(rows)) == len(rows) and len(set(tested)) == len(tested)
    assert sorted(rows) == sorted(tested)
    assert all(
        len(re.findall(r" \| ", line)) == 1
        for line in PAGE.read_text().splitlines()
        if line[:2] == "| "
    )
