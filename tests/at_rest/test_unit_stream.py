# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Whole weights that leave a sharded model, and what changed of them: the bits that the model
computes with, within the memory of two units, and no byte to ranks that do not ask for it.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp import (
    ConfigurationError,
    ScheduleConfig,
    ShardedModel,
    ShardSizes,
    WeightDelta,
    apply_delta,
    shard,
)
from megatron_asynchzp.engine.at_rest.unit_stream import stream_units
from megatron_asynchzp.engine.sharding import value_hash as hashes
from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero.marks import Marks, packed, unpacked
from scripts.testbed.counters import total
from scripts.testbed.fabric.network import Network
from scripts.testbed.profile import named_profile
from scripts.testbed.ranks import join_fabric, run_ranks
from tests.support.engine import build_toy, nested_sizes, shard_model
from tests.support.live_memory import counted_allocations
from tests.support.toy_models import RoutedLM, ToyLM, toy_batch, toy_loss

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WORLD_SIZE = 4


def bits_of(values: torch.Tensor) -> list[int]:
    return values.detach().view(torch.int16 if values.itemsize == 2 else torch.int32).tolist()


def new_sharded(
    sizes: Collection[int],
    dtype: torch.dtype = BF16,
    lr: float = 1e-2,
    early: str = "auto",
    model: Any = None,
) -> ShardedModel:
    model = model or build_toy(dtype)
    schedule = ScheduleConfig(early_update=early)
    return shard(
        model,
        model.blocks,
        ShardSizes(*sizes),
        lambda params: torch.optim.AdamW(params, lr=lr),
        schedule=schedule,
    )


def train_step(sharded: ShardedModel, step: int, max_norm: float = 1e9) -> None:
    sharded.zero_grad()
    toy_loss(sharded.model, toy_batch(step, 0, dist.get_rank())).backward()
    sharded.clip_grad_norm_(max_norm)
    sharded.step()


# ---- dense


def compare_streams() -> list[tuple]:
    """What differs from the whole model, for every choice of sizes, of ranks and of dtypes."""
    wrong, rank = [], dist.get_rank()
    asked = [None, {0}, {3}, {0, 1}, {1, 2}, {0, 2, 3}]
    for sizes, dtype in product(nested_sizes(WORLD_SIZE), (BF16, FP32)):
        model = build_toy(dtype, is_tied=True)
        model.norm.requires_grad_(False)
        expected = {name: value.detach().clone() for name, value in model.named_parameters()}
        runtime = shard_model(model, sizes)
        for receivers, wanted in product(asked, (None, FP32, BF16, FP16)):
            found = {
                name: bits_of(value)
                for _, params, _ in stream_units(runtime, receivers, wanted)
                for name, value in params
            }
            is_mine = receivers is None or rank in receivers
            due = {
                name: bits_of(value.to(wanted or dtype))
                for name, value in expected.items()
                if is_mine
            }
            if found != due:
                wrong.append((sizes, dtype, receivers, wanted))
        runtime.close()
    return wrong


@pytest.mark.slow
def test_receivers_get_the_bits_of_the_model_in_any_dtype_and_the_others_nothing():
    assert run_ranks(compare_streams, WORLD_SIZE) == [[]] * WORLD_SIZE


def stream_after_steps(sizes: tuple[int, int, int]) -> None:
    torch.manual_seed(5)
    model = RoutedLM().to(BF16)
    model.routes = [[2, 0, 1, 3]] * 2
    sharded = new_sharded(sizes, model=model)
    before = [name for name, _ in sharded.stream_weights()]
    assert before == [name for unit in sharded.runtime.units for name in unit.param_names]
    for step in range(2):
        train_step(sharded, step)
    main = {name: bits_of(value) for name, value in sharded.stream_weights(dtype=FP32)}
    rounded = {name: bits_of(value) for name, value in sharded.stream_weights()}
    assert rounded == {name: bits_of(value) for name, value in sharded.full_params()}
    parts = {
        name: value.flatten()[part.held.start : part.held.stop].clone()
        for name, value in sharded.stream_weights(dtype=FP32)
        for part in sharded._trained
        if part.name == name
    }
    for part in sharded._trained:
        assert torch.equal(parts[part.name], part.values), part.name
    assert main.keys() == rounded.keys()
    assert rounded.keys() == set(before)
    used = [name.split(".")[1] for name in rounded if name.startswith("blocks")]
    assert list(dict.fromkeys(used)) == ["2", "0", "1", "3"]
    # Training goes on afterwards, and inference may be on meanwhile.
    with torch.inference_mode():
        assert rounded == {name: bits_of(value) for name, value in sharded.stream_weights()}
    train_step(sharded, 2)
    sharded.close()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 2)])
def test_a_stream_between_two_steps_has_the_main_parameters_or_what_the_model_computes_with(sizes):
    run_ranks(stream_after_steps, 2, sizes)


def count_memory(
    _: Network, sizes: tuple[int, int, int], receivers: tuple[int, ...] | None
) -> None:
    """The network takes no memory of its own, which gloo does."""
    hashes._WORDS_ON_CPU = 2**6  # which takes little memory
    sharded = new_sharded(sizes, model=build_toy(BF16, width=256, depth=6))
    train_step(sharded, 0)
    sharded.mark_weights("start")
    train_step(sharded, 1)
    sharded.runtime.settle()
    nbytes = sorted(unit.gathered_nbytes for unit in sharded.runtime.units)
    largest = max(param.numel() for param in sharded.model.parameters())
    is_gathered = sizes[0] > 1 and (receivers is None or dist.get_rank() in receivers)
    bound = sum(nbytes[-2:]) if is_gathered else 0
    if receivers is not None and sizes[1] < sizes[0]:
        bound += nbytes[-1] // sizes[1]  # parts that are passed on along the inner axis
    # A bit per element of two units; indices and values of one tensor, and what finds them.
    more = sum(nbytes[-2:]) // 16 + 16 * largest
    for stream, limit in (
        (lambda: sharded.stream_weights(receivers=receivers), bound),
        (lambda: sharded.stream_changes("start", receivers=receivers), bound + more),
    ):
        with counted_allocations() as memory:
            before = memory.live_nbytes
            memory.reset_peak()
            for _value in stream():
                pass
            extra = memory.peak_nbytes - before
        assert extra <= limit + 4096, (extra, limit, nbytes)
        assert not is_gathered or extra > nbytes[-1]  # the count counts
    sharded.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, receivers", [((4, 4, 4), None), ((1, 4, 4), None), ((4, 2, 4), (1,))]
)
def test_a_stream_takes_the_memory_of_two_units_and_none_if_nothing_is_gathered(sizes, receivers):
    join = partial(join_fabric, named_profile("ethernet-1g"))
    run_ranks(count_memory, WORLD_SIZE, sizes, receivers, join=join)


def count_bytes_of_axes(
    network: Network, sizes: tuple[int, int, int], subsets: list[set[int]]
) -> list[tuple[int, int, int]]:
    """For each set of receivers: bytes that this rank sends within its node and to the other one,
    and those of the whole model."""
    sharded = new_sharded(sizes)
    whole = sum(unit.gathered_nbytes for unit in sharded.runtime.units)
    list(stream_units(sharded.runtime, ()))  # what ranks compare once
    counted = []
    for receivers in subsets:
        before = network.counters.snapshot()
        for _ in stream_units(sharded.runtime, receivers):
            pass
        sent = total(network.counters.since(before).values())
        counted.append((sent.wire_nbytes - sent.node_nbytes, sent.node_nbytes, whole))
    sharded.close()
    return counted


@pytest.mark.slow
def test_between_nodes_a_byte_is_sent_once_to_each_node_and_within_one_once_to_each_receiver():
    """Where parameters are gathered along two axes, for every set of receivers: never more often
    than once for each receiver on either link, and less often on the slow one."""
    subsets = [
        set(chosen) for size in range(1, 5) for chosen in combinations(range(WORLD_SIZE), size)
    ]
    profile = replace(named_profile("ethernet-1g"), ranks_per_node=2)
    join = partial(join_fabric, profile)
    counted = run_ranks(count_bytes_of_axes, WORLD_SIZE, (4, 2, 4), subsets, join=join)
    for receivers, ranks in zip(subsets, zip(*counted, strict=True), strict=True):
        half = ranks[0][2] // 2
        nodes = {receiver // 2 for receiver in receivers}
        assert sum(within for within, _, _ in ranks) == half * len(receivers)
        assert sum(between for _, between, _ in ranks) == half * len(nodes)


# ---- changes


class Rollout:
    """A copy of a model's weights that follows by deltas; `marked` is what it has."""

    def __init__(self, sharded: ShardedModel):
        self.sharded = sharded
        self.weights = {name: value.clone() for name, value in sharded.stream_weights()}
        sharded.mark_weights("rollout")

    def follow(self) -> list[WeightDelta]:
        """Take the changes over, compare, mark again."""
        deltas = []
        for delta in self.sharded.stream_changes("rollout"):
            apply_delta(self.weights, delta)
            deltas.append(delta)
        found = {name: bits_of(value) for name, value in self.weights.items()}
        expected = {name: bits_of(value) for name, value in self.sharded.full_params()}
        assert found == expected
        self.sharded.mark_weights("rollout")
        return deltas


def small_model() -> ToyLM:
    """bf16, of N(0, 0.02^2) but for norms and biases; one parameter is frozen."""
    model = build_toy(BF16)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.02)
    model.get_parameter("blocks.1.norm.bias").requires_grad_(False)
    return model


def follow_writes(sizes: tuple[int, int, int]) -> None:
    """What writes weights otherwise than by a step."""
    sharded = new_sharded(sizes, model=small_model())
    train_step(sharded, 0)
    rollout = Rollout(sharded)
    model = sharded.model
    state = sharded.state_dict()
    saved = {
        name: value.values.clone() for name, value in state.items() if name.startswith("model.")
    }
    train_step(sharded, 1)
    rollout.follow()

    state = sharded.state_dict()
    for name, values in saved.items():  # what torch.distributed.checkpoint.load does
        state[name].values.copy_(values + 1 if "blocks.1.norm.bias" in name else values)
    sharded.load_state_dict(state)
    assert "blocks.1.norm.bias" in {delta.name for delta in rollout.follow()}

    values = {name: torch.randn(value.shape) for name, value in rollout.weights.items()}
    for value in values.values():
        dist.broadcast(value, 0)
    sharded.load_full_params(values)
    assert {delta.name for delta in rollout.follow()} == set(values)
    model.load_state_dict({name: value + 1 for name, value in values.items()})
    assert {delta.name for delta in rollout.follow()} == set(values)

    with sharded.changing_params():
        for group in sharded.optimizer.param_groups:
            for param in group["params"]:
                param.data.neg_()
    assert rollout.follow()
    for value in (0.0, -0.0, float("nan"), -0.0, 1.0):
        with sharded.changing_params():
            for group in sharded.optimizer.param_groups:
                for param in group["params"]:
                    param.data[::5] = value
        assert rollout.follow()
    sharded.close()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 2), (1, 1, 1)])
def test_deltas_have_what_is_loaded_or_written_between_steps(sizes):
    run_ranks(follow_writes, 2, sizes)


def follow_fp32() -> None:
    sharded = new_sharded((2, 2, 2), FP32)
    rollout = Rollout(sharded)
    train_step(sharded, 0)
    assert all(delta.indices is None for delta in rollout.follow())
    sharded.mark_weights("second")
    train_step(sharded, 1)
    names = [delta.name for delta in sharded.stream_changes("second", receivers=[1])]
    assert bool(names) is (dist.get_rank() == 1)
    sharded.forget_mark("second")
    assert rollout.follow()
    with pytest.raises(ConfigurationError, match="no mark 'second' of the weights"):
        next(sharded.stream_changes("second"))
    sharded.close()


def test_fp32_weights_come_whole_to_receivers_alone_and_marks_know_nothing_of_each_other():
    run_ranks(follow_fp32, 2)


def refuse_all() -> list[str]:
    sharded = new_sharded((2, 2, 2))
    said: list[str] = []

    def refused(action: Callable[[], object]) -> None:
        try:
            action()
            said.append("nothing")
        except ConfigurationError as error:
            said.append(str(error))

    rank = dist.get_rank()
    rollout = Rollout(sharded)
    train_step(sharded, 0)
    refused(lambda: list(sharded.stream_changes("nothing")))
    refused(lambda: sharded.forget_mark("nothing"))
    refused(lambda: list(sharded.stream_weights(receivers=[])))
    refused(lambda: list(sharded.stream_weights(receivers=[2])))
    refused(lambda: list(sharded.stream_weights(dtype=torch.int8)))
    refused(lambda: list(sharded.stream_weights(receivers=[rank])))
    refused(lambda: dict(sharded.stream_weights()))
    refused(lambda: [value.zero_() for _, value in sharded.stream_weights()])
    stream = sharded.stream_weights()
    next(stream)
    refused(lambda: next(sharded.stream_weights()))
    refused(lambda: sharded.mark_weights("rollout"))
    refused(sharded.step)
    refused(sharded.sleep)
    refused(lambda: toy_loss(sharded.model, toy_batch(0, 0, 0)))
    stream.close()
    rollout.follow()
    loss = toy_loss(sharded.model, toy_batch(1, 0, rank))
    refused(lambda: next(sharded.stream_weights()))
    refused(lambda: sharded.mark_weights("rollout"))
    loss.backward()
    sharded.step()
    sharded.sleep()
    refused(lambda: next(sharded.stream_weights()))
    refused(lambda: sharded.mark_weights("rollout"))
    sharded.wake()
    rollout.follow()
    sharded.close()
    return said


@pytest.mark.slow
def test_what_cannot_be_streamed_is_refused_in_one_line_and_nothing_is_lost():
    unknown = "no mark 'nothing' of the weights; there are"
    other = "this rank calls stream_weights(receivers=[{}], dtype=None), another one stream"
    taken, asleep = "an iterator of whole parameters is open", "the sharded model is asleep"
    for rank, said in enumerate(run_ranks(refuse_all, 2)):
        assert all(line.startswith(unknown) and "\n" not in line for line in said[:2])
        assert [line.partition("(")[0] for line in said[2:5]] == ["stream_weights"] * 3
        assert said[5].startswith(other.format(rank))
        assert "still kept" in said[6] and "was written to" in said[7]
        assert [line.partition(".")[0] for line in said[8:13]] == [taken] * 5
        within = [
            f"{call}() within a step is not allowed" for call in ("stream_weights", "mark_weights")
        ]
        assert [line.partition(".")[0] for line in said[13:]] == [*within, asleep, asleep]


# ---- the same in short


def follow_in_short(network: Network) -> None:
    hashes._WORDS_ON_CPU = 2**6  # which takes little memory
    sharded = new_sharded((2, 2, 4), early="on", model=build_toy(BF16, width=64, depth=5))
    rollout, rank = Rollout(sharded), dist.get_rank()
    nbytes = sorted(unit.gathered_nbytes for unit in sharded.runtime.units)
    train_step(sharded, 0)
    assert rollout.follow()

    before = network.counters.snapshot()
    with counted_allocations() as memory:
        memory.reset_peak()
        for _ in sharded.stream_weights(receivers=[1]):
            assert rank == 1
        allowed = (sum(nbytes[-2:]) if rank == 1 else 0) + 4096
        assert memory.peak_nbytes <= allowed, (memory.peak_nbytes, allowed)
        assert rank != 1 or memory.peak_nbytes > nbytes[-1]
    counted = network.counters.since(before).items()
    streamed = total(tally for account, tally in counted if "GATHER" in account.group)
    assert streamed.wire_nbytes == (sum(nbytes) // 2 if rank == 0 else 0)

    sharded.load_full_params({name: value + 1 for name, value in rollout.weights.items()})
    assert {delta.name for delta in rollout.follow()} == set(rollout.weights)
    with pytest.raises(ConfigurationError, match="before the next unit is taken"):
        dict(sharded.stream_weights())
    sharded.close()


def test_a_copy_follows_what_is_sent_early_and_loaded_within_two_units_and_to_receivers_alone():
    run_ranks(follow_in_short, WORLD_SIZE, join=partial(join_fabric, named_profile("ethernet-1g")))


# ---- pure


@pytest.mark.parametrize("numel", [8, 64, 4096])
def test_flags_are_packed_without_loss(numel):
    torch.manual_seed(numel)
    flags = torch.rand(numel) < 0.3
    assert torch.equal(unpacked(packed(flags), Range(0, numel), (numel,)), flags)
    assert torch.equal(
        unpacked(packed(flags), Range(8 * (numel > 8), numel - 3), (-1,)),
        flags[8 * (numel > 8) : numel - 3],
    )
    assert packed(flags).numel() == numel // 8


PATTERNS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_bit_pattern_that_becomes_another_one_is_marked_and_no_other(dtype):
    values = PATTERNS.view(dtype)
    marks = Marks(values.numel(), values.device, is_trained=True, writes_are_casts=True)
    zeros = torch.zeros(values.numel(), dtype=torch.float32)
    for before, after in (
        (values, values.roll(1)),
        (torch.zeros_like(values), zeros.copysign(torch.tensor(-1.0)).to(dtype)),
        (values, values),
    ):
        place = before.clone()
        marks.set("here")
        marks.write(after.float(), place)
        changed = place.view(torch.int16) != before.view(torch.int16)
        found = unpacked(marks.bits["here"], Range(0, values.numel()), (-1,))
        assert torch.equal(found, changed)


def test_a_delta_is_applied_to_the_bit_and_whole_where_that_is_shorter():
    torch.manual_seed(0)
    old = PATTERNS.view(BF16).clone().view(256, 256)
    for share in (0.0, 0.01, 0.3, 0.5, 1.0):
        changed = torch.rand(old.shape) < share
        new = torch.where(changed, PATTERNS.flip(0).view(BF16).view(256, 256), old)
        delta = WeightDelta.of("weight", new, changed)
        assert (delta.indices is None) is (share >= 0.5)
        assert delta.nbytes <= old.nbytes
        for target in (old.clone(), old.t().contiguous().t()):
            apply_delta({"weight": target}, delta)
            assert torch.equal(target.view(torch.int16), new.view(torch.int16))
    whole = WeightDelta.of("weight", old, None)
    refused = [
        ({}, "weight: there is a delta of it, but no such weight here"),
        ({"weight": old[:3]}, "the weight here is of shape .3, 256."),
        ({"weight": old.float()}, "in torch.float32, its delta of"),
    ]
    for weights, text in refused:
        with pytest.raises(ConfigurationError, match=text):
            apply_delta(weights, whole)
