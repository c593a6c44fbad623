# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The library's front door: a plain training loop around `shard` trains as one around the model."""

import os
import runpy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint

from megatron_asynchzp import ScheduleConfig, ShardedModel, ShardSizes, shard
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.ranks import RankPlace, free_port, run_ranks, start_process
from tests.support import loops
from tests.support.bare_environment import forget_other_packages
from tests.support.engine import build_toy, nested_sizes
from tests.support.loops import (
    MICRO_BATCHES,
    load,
    marking_step,
    new_adamw,
    of_micro_batches,
    params_of,
    save,
)
from tests.support.selection import slow_unless
from tests.support.toy_models import toy_batch, toy_llama_config, toy_loss


def sharded_toy(sizes: tuple[Any, ...], is_tied: bool = False, **kwargs) -> ShardedModel:
    return loops.sharded_toy(sizes, build_toy(is_tied=is_tied, **kwargs))


LOOP = loops.Loop(losses=of_micro_batches, step=marking_step)
train, plainly = LOOP.train, partial(LOOP.plainly, rel=1e-5)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# Fast, the kinds of nesting; all of them train as DDP in tests/zero/test_engine_parity.py.
SOME_SIZES = [(1, 2, 4), (4, 1, 4), (2, 2, 2)]


def check_nestings(all_sizes: list[tuple[int, int, int]]) -> None:
    for is_tied in (False, True):
        model = build_toy(is_tied=is_tied)
        start = {name: param.detach().clone() for name, param in model.named_parameters()}
        plain = plainly(model=model)
        for sizes in [(4, 4, 4)] if is_tied else all_sizes:
            with sharded_toy(sizes, is_tied) as sharded:
                assert_same(params_of(sharded), start)
                assert train(sharded) == plain, (sizes, is_tied)


@pytest.mark.parametrize("all_sizes", [SOME_SIZES, slow_unless(False, nested_sizes(4))])
def test_a_plain_loop_starts_and_trains_as_without_sharding_for_every_nesting(all_sizes):
    run_ranks(check_nestings, 4, all_sizes)


def sharded_keeping_toy(sizes: tuple[int, int, int]) -> ShardedModel:
    """What is kept decides how gradients are grouped in sums."""
    model = build_toy()
    schedule = ScheduleConfig(keep_grads_nbytes=2**15)
    return shard(model, model.blocks, ShardSizes(*sizes), new_adamw, schedule=schedule)


BUILDS: dict[str, Callable[..., ShardedModel]] = {
    "bf16": partial(sharded_toy, dtype=torch.bfloat16),
    "kept": sharded_keeping_toy,
    "fp32": sharded_toy,
}
CHANGED = {"lr": 3e-3, "weight_decay": 0.01, "betas": (0.8, 0.9)}


def check_resumes(folder: Path) -> None:
    expected: list[tuple[float, float]] = []
    for name, build in BUILDS.items():
        saved = (1, 1, 4, (2,)) if name == "fp32" else (2, 2, 4)
        with build(saved) as first:
            train(first, range(2))
            for group in first.optimizer.param_groups:
                group.update(CHANGED)
            save(first, folder / name)
            expected, params = train(first, range(2, 4)), params_of(first)
        with build(saved) as other:
            load(other, folder / name)
            assert all(group.items() >= CHANGED.items() for group in other.optimizer.param_groups)
            assert train(other, range(2, 4)) == expected, name
            assert_same(params_of(other), params)
    close = [pytest.approx(step, rel=1e-5) for step in expected]
    for sizes in [(1, 1, 4), (4, 4, 4, (2,)), (1, 1, 1)]:
        with sharded_toy(sizes) as other:
            load(other, folder / "fp32")
            assert train(other, range(2, 4)) == close, sizes


def test_a_checkpoint_and_its_changed_settings_go_on_bit_for_bit_and_into_any_other_sizes(tmp_path):
    run_ranks(check_resumes, 4, tmp_path)


def check_groups() -> None:
    pairs, pair = ([0, 1], [2, 3]), dist.get_rank() // 2
    group = [dist.new_group(ranks) for ranks in pairs][pair]
    model = build_toy(depth=1 + pair)
    with shard(model, model.blocks, ShardSizes(1, 2, 2), new_adamw, group=group) as sharded:
        ours = train(sharded, group=group)
    assert ours == plainly(model=build_toy(depth=1 + pair), ranks=pairs[pair])


def test_two_groups_of_ranks_train_two_models_that_know_nothing_of_each_other():
    run_ranks(check_groups, 4)


def check_one_micro_batch() -> None:
    with sharded_toy((1, 1, 2)) as sharded:
        for step in range(2):
            train(sharded, range(1))  # leaves behind that another micro-batch follows, or not
            sharded.set_is_last_micro_batch(False)
            sharded.zero_grad()
            counts = sharded.runtime.driver.counts
            before = counts["grad-sync"]
            toy_loss(sharded.model, toy_batch(step, 0, dist.get_rank())).backward()
            assert counts["grad-sync"] - before == len(sharded.runtime.units)
            sharded.step()


def test_the_backward_of_a_step_of_one_micro_batch_reduces_over_all_ranks_unasked():
    """Not only step(), which comes too late to run beside the computation."""
    run_ranks(check_one_micro_batch, 2)


class OwnKind(nn.Parameter):
    """A class of parameters, which a library tells from others by isinstance."""


class Oddities(nn.Module):
    """Each kind of parameter and of buffer that is unusual and supported."""

    def __init__(self, width: int = 16, vocab: int = 37):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width, sparse=True)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, width))
        self.transposed = nn.Parameter((torch.randn(width, width) / width).t())
        self.own = OwnKind(torch.ones(width))
        self.exact = nn.Parameter(torch.rand(width, dtype=torch.float64), requires_grad=False)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("phase", torch.polar(torch.ones(width), torch.arange(float(width))))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.output = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.training is False or type(self.own) is OwnKind
        x = self.embedding(tokens) * self.scale + self.nothing.sum()
        x = x + torch.nn.functional.linear(x, self.transposed) * self.own * self.exact.float()
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.output((x * self.phase).real)


def sharded_oddities(sizes: tuple[int, int, int], kept_nbytes: int) -> ShardedModel:
    torch.manual_seed(5)
    model, schedule = Oddities(), ScheduleConfig(keep_grads_nbytes=kept_nbytes)
    units = [model.embedding, model.output]
    return shard(model, units, ShardSizes(*sizes), new_adamw, schedule=schedule)


def check_oddities(folder: Path) -> None:
    torch.manual_seed(5)
    plain = Oddities()
    plain.embedding.sparse = False  # torch's AdamW wants it so
    theirs = plainly(range(4), plain)
    for how in (((2, 2, 2), 0), ((2, 2, 2), 2**20), ((1, 1, 2), 0)):
        with sharded_oddities(*how) as sharded:
            ours = train(sharded, range(2))
            save(sharded, folder / str(how))
            mean = sharded.model.norm.running_mean.clone()
            ours += train(sharded, range(2, 4))
        assert ours == theirs
        dist.broadcast(mean, 0)
        with sharded_oddities(*how) as resumed:
            state = resumed.state_dict()
            assert "model.phase" in state and "model.scratch" not in state
            assert not any(key.startswith("optim.exact") for key in state)
            load(resumed, folder / str(how))
            assert torch.equal(resumed.model.norm.running_mean, mean)
            assert resumed.model.norm.num_batches_tracked == 2 * MICRO_BATCHES
            assert train(resumed, range(2, 4)) == ours[2:]
            assert torch.equal(params_of(resumed)["exact"], plain.exact)


def test_unusual_parameters_and_buffers_train_as_in_torch_and_resume_bit_for_bit(tmp_path):
    run_ranks(check_oddities, 2, tmp_path)


def counted_from(first: float, shape: torch.Size) -> torch.Tensor:
    """No two elements are the same."""
    return first + torch.arange(shape.numel()).view(shape) / 1024


def sharded_half_frozen(sizes: tuple[int, int, int], frozen: float, trained: float) -> ShardedModel:
    """Its parameters are counted from these."""
    model = build_toy()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.requires_grad_("up" in name)
            param.copy_(counted_from(trained if param.requires_grad else frozen, param.shape))
    return shard(model, model.blocks, ShardSizes(*sizes), new_adamw)


def check_half_frozen(whole: Path, folder: Path) -> None:
    with sharded_half_frozen((1, 2, 2), 0.5, 0.25) as first:
        checkpoint.save(first.state_dict(), checkpoint_id=whole)
        checkpoint.save(first.state_dict(only_trained=True), checkpoint_id=folder)
    stored = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert not [name for name in stored if name.startswith("model.") and ".up." not in name]
    with sharded_half_frozen((2, 2, 2), 7.0, 8.0) as other:
        state = other.state_dict(only_trained=True)
        checkpoint.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        for name, value in params_of(other).items():
            assert torch.equal(value, counted_from(0.25 if "up" in name else 7.0, value.shape))
        with pytest.raises(checkpoint.CheckpointException, match=r"Missing key in .*: model\."):
            checkpoint.load(other.state_dict(), checkpoint_id=folder)
        load(other, whole)
        for name, value in params_of(other).items():
            assert torch.equal(value, counted_from(0.25 if "up" in name else 0.5, value.shape))
        checkpoint.save(other.state_dict(), checkpoint_id=whole / "again")
    with sharded_half_frozen((1, 1, 2), 3.0, 4.0) as last:
        load(last, whole / "again")
        for name, value in params_of(last).items():
            assert torch.equal(value, counted_from(0.25 if "up" in name else 0.5, value.shape))


def test_frozen_parameters_are_saved_into_other_sizes_or_left_as_they_are(tmp_path):
    run_ranks(check_half_frozen, 2, tmp_path / "whole", tmp_path / "trained")


def check_refusals() -> None:
    for name, is_trained in (("embedding.weight", True), ("blocks.1.up.weight", False)):
        model = build_toy()
        param = model.get_parameter(name).requires_grad_(not is_trained)
        with shard(model, model.blocks, ShardSizes(2, 2, 2), new_adamw) as sharded:
            train(sharded, range(1))
            sharded.zero_grad()
            param.requires_grad_(is_trained)
            toy_loss(model, toy_batch(1, 0, 0)).backward()
            before = params_of(sharded)
            with pytest.raises(ConfigurationError, match=f"^{name}: requires_grad is {is_trained}"):
                sharded.step()
            assert all(torch.equal(value, before[key]) for key, value in sharded.full_params())

    with pytest.raises(ConfigurationError, match="optim shard size 1 is not a multiple of"):
        sharded_toy((1, 2, 1))


def test_sizes_that_do_not_nest_and_a_requires_grad_that_changes_are_refused_by_name():
    """The latter before anything is updated."""
    run_ranks(check_refusals, 2)


def new_encoder() -> tuple[nn.Module, Iterable[nn.Module]]:
    layers = [
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
    ]
    return nn.Sequential(nn.Embedding(37, 16), *layers, nn.Linear(16, 37)), layers


def new_llama() -> tuple[nn.Module, Iterable[nn.Module]]:
    from transformers import LlamaForCausalLM

    class Llama(LlamaForCausalLM):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids=tokens, use_cache=False).logits

    model = Llama(toy_llama_config())
    return model, model.model.layers


def check_model(build: Callable[[], tuple[nn.Module, Iterable[nn.Module]]]) -> None:
    torch.manual_seed(5)
    plain, _ = build()
    torch.manual_seed(5)
    model, layers = build()
    with shard(model, layers, ShardSizes(1, 2, 2), new_adamw) as sharded:
        ours = train(sharded)
    assert ours == plainly(model=plain)


@pytest.mark.parametrize("build", [new_encoder, new_llama])
def test_models_of_torch_and_transformers_train_as_without_sharding(build):
    run_ranks(check_model, 2, build)


def run_example(folder: Path, place: RankPlace) -> None:
    """As torchrun would start it, but for the import of torch."""
    os.chdir(folder)
    os.environ.update(place.environment())
    with open(f"{place.rank}.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    forget_other_packages()
    runpy.run_path("example.py", run_name="__main__")


def test_the_example_of_the_readme_runs_as_it_stands_where_the_package_alone_is_installed(tmp_path):
    page = (Path(__file__).parents[3] / "README.md").read_text()
    (tmp_path / "example.py").write_text(page.split("```python\n")[1].split("```")[0])
    port = free_port()
    places = [RankPlace(rank, 4, 4, port) for rank in range(4)]
    processes = [start_process(run_example, tmp_path, place) for place in places]
    for process in processes:
        process.join(timeout=120)
        process.kill()
        process.join()
    text = (tmp_path / "0.log").read_text()
    assert [process.exitcode for process in processes] == [0] * 4, text[-2000:]
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert (tmp_path / "checkpoint" / ".metadata").exists()
