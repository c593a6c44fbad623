# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The library's front door: a plain training loop around `shard` trains as one around the model."""

import os
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint

from megatron_asynchzp import ScheduleConfig, ShardedModel, ShardSizes, shard
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.ranks import Place, free_port, run_ranks, start_process
from tests.support.engine import build_toy, nested_sizes
from tests.support.toy_models import toy_batch, toy_loss

CLIP = 0.3
STEPS, MICRO_BATCHES = 3, 2


def new_adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sharded_toy(sizes: tuple[int, int, int], is_tied: bool = False, **kwargs) -> ShardedModel:
    model = build_toy(is_tied=is_tied, **kwargs)
    return shard(model, model.blocks, ShardSizes(*sizes), new_adamw)


def train(sharded: ShardedModel, steps: range) -> list[tuple[float, float]]:
    """Mean loss over the ranks and gradient norm of each step."""
    seen = []
    for step in steps:
        sharded.zero_grad()
        total = torch.zeros(())
        for index in range(MICRO_BATCHES):
            sharded.set_is_last_micro_batch(index == MICRO_BATCHES - 1)
            loss = toy_loss(sharded.model, toy_batch(step, index, dist.get_rank()))
            (loss / MICRO_BATCHES).backward()
            total += loss.detach() / MICRO_BATCHES
        norm = sharded.clip_grad_norm_(CLIP)
        sharded.step()
        dist.all_reduce(total)
        seen.append((total.item() / dist.get_world_size(), norm.item()))
    return seen


def train_plainly(model: nn.Module, steps: range, world_size: int) -> list[tuple[float, float]]:
    """The same in one process, without sharding, over the batches of all ranks."""
    optimizer, seen = new_adamw(model.parameters()), []
    for step in steps:
        optimizer.zero_grad()
        total = torch.zeros(())
        for rank in range(world_size):
            for index in range(MICRO_BATCHES):
                loss = toy_loss(model, toy_batch(step, index, rank)) / MICRO_BATCHES / world_size
                loss.backward()
                total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        seen.append((total.item(), norm.item()))
    return seen


def check_every_nesting() -> None:
    world = dist.get_world_size()
    for is_tied in (False, True):
        plain = train_plainly(build_toy(is_tied=is_tied), range(STEPS), world)
        for sizes in [(1, 2, 4), (4, 4, 4)] if is_tied else nested_sizes(world):
            with sharded_toy(sizes, is_tied) as sharded:
                for ours, theirs in zip(train(sharded, range(STEPS)), plain, strict=True):
                    assert ours == pytest.approx(theirs, rel=1e-5), (sizes, is_tied)


def test_a_plain_loop_trains_as_without_sharding_for_every_nesting_of_4_ranks():
    run_ranks(check_every_nesting, 4)


def check_checkpoint(folder: Path, build: Callable[..., ShardedModel]) -> None:
    with build((1, 2, 4)) as first:
        train(first, range(2))
        checkpoint.save(first.state_dict(), checkpoint_id=folder)
        expected = train(first, range(2, 4))
    for sizes in [(1, 2, 4), (4, 4, 4), (2, 1, 2), (1, 1, 1)]:
        with build(sizes) as other:
            state = other.state_dict()
            checkpoint.load(state, checkpoint_id=folder)
            other.load_state_dict(state)
            bound = 0.0 if sizes == (1, 2, 4) else 1e-5
            for ours, theirs in zip(train(other, range(2, 4)), expected, strict=True):
                assert ours == pytest.approx(theirs, rel=bound), sizes


def test_a_checkpoint_goes_on_bit_for_bit_and_into_any_other_sizes(tmp_path):
    run_ranks(check_checkpoint, 4, tmp_path / "fp32", sharded_toy)


def sharded_bf16_toy(sizes: tuple[int, int, int]) -> ShardedModel:
    return sharded_toy(sizes, dtype=torch.bfloat16)


def sharded_keeping_toy(sizes: tuple[int, int, int]) -> ShardedModel:
    """What is kept decides how gradients are grouped in sums."""
    model = build_toy()
    schedule = ScheduleConfig(keep_grads_nbytes=2**15)
    return shard(model, model.blocks, ShardSizes(*sizes), new_adamw, schedule=schedule)


def params_of(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in sharded.full_params()}


def check_exact_resume(folder: Path, build: Callable[..., ShardedModel]) -> None:
    with build((2, 2, 4)) as first:
        train(first, range(2))
        checkpoint.save(first.state_dict(), checkpoint_id=folder)
        expected, params = train(first, range(2, 4)), params_of(first)
    with build((2, 2, 4)) as other:
        state = other.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        assert train(other, range(2, 4)) == expected
        resumed = params_of(other)
        assert [name for name in params if not torch.equal(params[name], resumed[name])] == []


def check_exact_resumes(folder: Path) -> None:
    check_exact_resume(folder / "bf16", sharded_bf16_toy)
    check_exact_resume(folder / "kept", sharded_keeping_toy)


def test_a_bf16_model_and_one_that_keeps_gradients_resume_bit_for_bit(tmp_path):
    run_ranks(check_exact_resumes, 4, tmp_path)


def check_full_params() -> None:
    model = build_toy(is_tied=True)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    with shard(model, model.blocks, ShardSizes(2, 2, 2), new_adamw) as sharded:
        seen = params_of(sharded)
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in seen)


def test_full_parameters_are_those_of_the_model_one_unit_at_a_time():
    run_ranks(check_full_params, 2)


def check_frozen() -> None:
    model = build_toy()
    model.embedding.weight.requires_grad = False
    before = model.embedding.weight.detach().clone()
    with shard(model, model.blocks, ShardSizes(2, 2, 2), new_adamw) as sharded:
        train(sharded, range(2))
        after = params_of(sharded)
        assert torch.equal(after["embedding.weight"], before)
        assert "model.embedding.weight" in sharded.state_dict()
        assert not any(key.startswith("optim.embedding") for key in sharded.state_dict())


def test_parameters_that_are_not_trained_stay_as_they_are():
    run_ranks(check_frozen, 2)


def check_groups() -> None:
    """Two groups of two ranks: a model of their own each, and batches of their own."""
    rank, pair = dist.get_rank(), dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = build_toy(depth=1 + pair)
    sharded = shard(model, model.blocks, ShardSizes(1, 2, 2), new_adamw, group=groups[pair])
    norms = []
    with sharded:
        for step in range(2):
            sharded.zero_grad()
            toy_loss(model, toy_batch(step, 0, rank)).backward()
            norms.append(sharded.clip_grad_norm_(CLIP).item())
            sharded.step()
    plain = build_toy(depth=1 + pair)
    optimizer = new_adamw(plain.parameters())
    for step, norm in enumerate(norms):
        optimizer.zero_grad()
        for member in (2 * pair, 2 * pair + 1):
            (toy_loss(plain, toy_batch(step, 0, member)) / 2).backward()
        assert norm == pytest.approx(
            nn.utils.clip_grad_norm_(plain.parameters(), CLIP).item(), rel=1e-5
        )
        optimizer.step()


def test_two_groups_of_ranks_train_two_models_that_know_nothing_of_each_other():
    run_ranks(check_groups, 4)


def set_optimizer(sharded: ShardedModel, **settings: object) -> None:
    for group in sharded.optimizer.param_groups:
        group.update(settings)


def check_settings(folder: Path) -> None:
    later = {"lr": 3e-3, "weight_decay": 0.01, "betas": (0.8, 0.9)}
    with sharded_toy((2, 2, 2)) as first:
        train(first, range(1))
        set_optimizer(first, **later)
        checkpoint.save(first.state_dict(), checkpoint_id=folder)
        train(first, range(1, 3))
        expected = params_of(first)
    with sharded_toy((2, 2, 2)) as other:
        state = other.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        for group in other.optimizer.param_groups:
            assert {key: group[key] for key in later} == later
        train(other, range(1, 3))
        assert all(torch.equal(value, expected[name]) for name, value in other.full_params())


def test_a_resumed_optimizer_has_the_settings_that_were_changed_on_the_way(tmp_path):
    run_ranks(check_settings, 2, tmp_path)


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
    theirs = train_plainly(plain, range(4), 2)
    for how in (((2, 2, 2), 0), ((2, 2, 2), 2**20), ((1, 1, 2), 0)):
        with sharded_oddities(*how) as sharded:
            ours = train(sharded, range(2))
            place = folder / str(how)
            checkpoint.save(sharded.state_dict(), checkpoint_id=place)
            mean = sharded.model.norm.running_mean.clone()
            ours += train(sharded, range(2, 4))
        assert ours == [pytest.approx(step, rel=1e-5) for step in theirs]
        dist.broadcast(mean, 0)
        with sharded_oddities(*how) as resumed:
            state = resumed.state_dict()
            assert "model.phase" in state and "model.scratch" not in state
            checkpoint.load(state, checkpoint_id=place)
            resumed.load_state_dict(state)
            assert torch.equal(resumed.model.norm.running_mean, mean)
            assert resumed.model.norm.num_batches_tracked == 2 * MICRO_BATCHES
            assert train(resumed, range(2, 4)) == ours[2:]


def test_unusual_parameters_and_buffers_train_as_in_torch_and_resume_bit_for_bit(tmp_path):
    run_ranks(check_oddities, 2, tmp_path)


def check_changed_requires_grad() -> None:
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


def test_a_requires_grad_that_changes_after_shard_is_refused_before_anything_is_updated():
    run_ranks(check_changed_requires_grad, 2)


def check_refusal() -> None:
    model = build_toy()
    with pytest.raises(ConfigurationError, match="optim shard size 3 is not a multiple of"):
        shard(model, model.blocks, ShardSizes(2, 2, 3), new_adamw)


def test_sizes_that_do_not_nest_are_refused_by_name():
    run_ranks(check_refusal, 4)


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(37, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.output = nn.Linear(16, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def new_encoder() -> tuple[nn.Module, nn.ModuleList]:
    model = Encoder()
    return model, model.layers


class Logits(nn.Module):
    """The logits of a causal language model of transformers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def new_llama() -> tuple[nn.Module, nn.ModuleList]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    return Logits(model), model.model.layers


def check_model(build: Callable[[], tuple[nn.Module, nn.ModuleList]]) -> None:
    torch.manual_seed(5)
    plain, _ = build()
    torch.manual_seed(5)
    model, layers = build()
    with shard(model, layers, ShardSizes(1, 2, 2), new_adamw) as sharded:
        ours = train(sharded, range(STEPS))
    theirs = train_plainly(plain, range(STEPS), dist.get_world_size())
    assert ours == [pytest.approx(step, rel=1e-5) for step in theirs]


@pytest.mark.parametrize("build", [new_encoder, new_llama])
def test_models_of_torch_and_transformers_train_as_without_sharding(build):
    run_ranks(check_model, 2, build)


def run_example(folder: Path, place: Place) -> None:
    """As torchrun would start it, but for the import of torch."""
    os.chdir(folder)
    os.environ.update(place.environment())
    with open(f"{place.rank}.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    runpy.run_path("example.py", run_name="__main__")


def test_the_example_of_the_readme_runs_as_it_stands(tmp_path):
    page = (Path(__file__).parents[1] / "README.md").read_text()
    (tmp_path / "example.py").write_text(page.split("```python\n")[1].split("```")[0])
    port = free_port()
    places = [Place(rank, 4, 4, port) for rank in range(4)]
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
