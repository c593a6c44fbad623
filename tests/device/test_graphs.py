# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on the emulated device: what is captured runs at each replay as without a graph, what
CUDA refuses in a capture ends the run, and the watch looks into graphs. Each fault is a rule of
CUDA (Programming Guide, "CUDA Graphs"; Runtime API, "Graph Management") or of torch's graphs."""

import ctypes
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ScheduleConfig, ShardSizes, shard
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.topology import ShardTopology
from megatron_asynchzp.engine.zero import taken_grads
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.plan import plan_units
from scripts.testbed.contenders.adam import owned_params
from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from tests.device.programs import device_of_rank, new_adamw, new_toy
from tests.device.test_watch import new, now, on_side
from tests.support.selection import slow_unless
from tests.support.toy_models import toy_batch, toy_loss

Body = Callable[[], object]


def captured(body: Body) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


# ---- what is captured runs at each replay


def layers_of(width: int) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        for _ in range(3)
    ]
    return [layer.to(device_of_rank()) for layer in layers]


def trained(is_graphed: bool) -> list[float]:
    layers, device = layers_of(16), device_of_rank()
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    if is_graphed:
        samples = tuple((torch.randn(4, 16, device=device, requires_grad=True),) for _ in layers)
        layers = torch.cuda.make_graphed_callables(tuple(layers), samples, num_warmup_iters=2)
    losses = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(device)
        hidden.requires_grad_()
        for layer in layers:
            hidden = hidden + layer(hidden)
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [loss.item() for loss in losses]


def forked_and_joined() -> bool:
    """A graph with a second stream, replayed with other inputs, and with other work between."""
    value, weight = new(), new()
    side = torch.cuda.Stream()
    outputs: list[torch.Tensor] = []

    def body() -> None:
        hidden = value * weight
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            squares = hidden.square()
        roots = hidden.abs().sqrt()
        torch.cuda.current_stream().wait_stream(side)
        outputs.append(squares + roots)

    graph = captured(body)
    for number in range(4):
        value.fill_(number)
        graph.replay()
        weight.fill_(number + 2)
        graph.replay()
        hidden = torch.full_like(value, number * (number + 2))
        if not torch.equal(outputs[0], hidden.square() + hidden.sqrt()):
            return False
    return True


def drawn(is_graphed: bool) -> list[list[float]]:
    """Random numbers of the device's generator and of a registered one, in each of three rounds
    with others between."""
    device, x = device_of_rank(), new()
    x.fill_(1)
    own = torch.Generator(device)
    own.manual_seed(5)
    torch.cuda.manual_seed(3)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(own)
    outputs: list[torch.Tensor] = []

    def body() -> None:
        numbers = torch.rand(4, device=device, generator=own)
        dropped = nn.functional.dropout(x, 0.5)
        outputs[:] = [torch.cat((numbers, dropped[:8], torch.rand(4, device=device)))]

    if is_graphed:
        with torch.cuda.graph(graph):
            body()
    found: list[torch.Tensor] = []
    for _ in range(3):
        graph.replay() if is_graphed else body()
        found += [outputs[0].clone(), torch.rand(4, device=device)]
    return [numbers.tolist() for numbers in found]


def under_laws(laws: list[Delays]) -> list[tuple[bool, list[float], list[float]]]:
    from scripts.testbed.device import inside

    found = []
    for law in laws:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        found.append((forked_and_joined(), trained(False), trained(True)))
        numbers = drawn(False)
        assert len(set(map(tuple, numbers))) == len(numbers)
        assert drawn(True) == numbers
    return found


def test_a_replay_has_the_bits_of_the_same_calls_under_every_law_of_delay(worlds: DeviceWorlds):
    laws = [Delays(law, seed) for seed, law in enumerate(LAWS)]
    [found] = worlds.run(under_laws, 1, laws)
    first = found[0][1]
    assert len(set(first)) == 4
    assert found == [(True, first, first)] * len(laws)


def sums_of_ranks() -> bool:
    """A collective in a graph, beside one on another communicator that no graph has."""
    value, beside = new(), new()
    groups = [dist.new_group(range(dist.get_world_size())) for _ in range(2)]
    for group in groups:
        dist.all_reduce(beside, group=group)  # makes its communicator
    outputs: list[torch.Tensor] = []

    def body() -> None:
        total = value * 2
        dist.all_reduce(total, group=groups[0])
        outputs.append(total + 1)

    graph = captured(body)
    for number in range(3):
        value.fill_(number + dist.get_rank())
        beside.fill_(1)
        work = dist.all_reduce(beside, group=groups[1], async_op=True)
        graph.replay()
        work.wait()
        if outputs[0].sum().item() != 1000 * (4 * number + 3) or beside.sum().item() != 2000:
            return False
    return True


def test_a_collective_in_a_graph_is_that_of_each_replay(worlds: DeviceWorlds):
    for delays in (Delays(), Delays("slow-rank", 1)):
        assert worlds.run(sums_of_ranks, 2, delays=delays, timeout_s=60) == [True, True]


# ---- what CUDA refuses in a capture


def ask_for_an_event_afterwards() -> None:
    events: list[torch.cuda.Event] = []
    captured(lambda: events.append(now()))
    events[0].query()


def wait_for_an_event_of_an_ended_capture() -> None:
    events: list[torch.cuda.Event] = []
    captured(lambda: events.append(now()))
    torch.cuda.current_stream().wait_event(events[0])


def join_too_early() -> None:
    value, side = new(), torch.cuda.Stream()

    def body() -> None:
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.stream(side):
            value.add_(1)

    captured(body)


def capturing(body: Callable[[Any], object], make: Callable[[], object] = new) -> Body:
    """body: captured, of what was made before."""

    def run() -> None:
        made = make()
        captured(lambda: body(made))

    return run


def graph_of_its_own() -> torch.cuda.CUDAGraph:
    value = new()
    return captured(lambda: value.add_(1))


def drawn_from(own: torch.Generator) -> torch.Tensor:
    return torch.rand(3, device=own.device, generator=own)


_HOST = "a wait of the host for it is not allowed"
NOT_ALLOWED: dict[str, tuple[Body, str]] = {
    "a wait for a value": (capturing(lambda value: value.sum().item()), _HOST),
    "a stream that is not joined": (
        capturing(lambda value: on_side(value.clone, now())),
        "a stream that it forked is not joined",
    ),
    "a wait for the stream": (
        capturing(lambda _: torch.cuda.current_stream().synchronize()),
        _HOST,
    ),
    "a wait for the device": (
        capturing(lambda _: torch.cuda.synchronize()),
        "cudaDeviceSynchronize is not allowed",
    ),
    "a question to the stream": (
        capturing(lambda _: torch.cuda.current_stream().query()),
        "cudaStreamQuery of it is not allowed",
    ),
    "a wait for an event within": (
        capturing(lambda _: now().synchronize()),
        "the host asks for an event of a capture",
    ),
    "a question for an event afterwards": (
        ask_for_an_event_afterwards,
        "the host asks for an event of a capture",
    ),
    "an event of before": (
        capturing(lambda before: torch.cuda.current_stream().wait_event(before), now),
        "a wait for an event from outside of the capture",
    ),
    "an event of an ended capture": (
        wait_for_an_event_of_an_ended_capture,
        "an event of a capture that has ended",
    ),
    "a join that comes too early": (join_too_early, "a stream that it forked is not joined"),
    "the default stream": (
        lambda: torch.cuda.CUDAGraph().capture_begin(),
        "CUDA graphs must be captured on a non-default stream",
    ),
    "a capture within": (
        capturing(lambda _: torch.cuda.CUDAGraph().capture_begin()),
        "another capture is not allowed",
    ),
    "a launch within": (
        capturing(lambda inner: inner.replay(), graph_of_its_own),
        "the launch of a graph is not allowed",
    ),
    "a copy to pageable memory": (capturing(lambda value: value.cpu()), _HOST),
    "numbers of an unregistered generator": (
        capturing(drawn_from, lambda: torch.Generator(device_of_rank())),
        "generator is not registered",
    ),
}


def try_to_capture(what: str) -> None:
    NOT_ALLOWED[what][0]()


@pytest.mark.parametrize(
    "what", [slow_unless(place < 2, what) for place, what in enumerate(NOT_ALLOWED)]
)
def test_what_a_capture_does_not_allow_ends_in_one_line(worlds: DeviceWorlds, what: str):
    with pytest.raises(DeviceFailure, match=re.escape(NOT_ALLOWED[what][1])):
        worlds.run(try_to_capture, 1, what, timeout_s=60)


# ---- the watch looks into graphs


def write_beside_a_replay(is_ordered: bool) -> None:
    """A graph reads what a stream writes."""
    value = new()
    graph = captured(value.clone)
    end = on_side(lambda: value.fill_(3.0), now())
    if is_ordered:
        torch.cuda.current_stream().wait_event(end)
    graph.replay()
    end.synchronize()


def read_beside_a_replay(is_ordered: bool) -> None:
    """A stream reads what a graph writes."""
    value = new()
    graph = captured(lambda: value.add_(1))
    before = now()
    graph.replay()
    on_side(value.clone, now() if is_ordered else before).synchronize()


def replay_on_two_streams(is_ordered: bool) -> None:
    value = new()
    graph = captured(lambda: value.add_(1))
    before = now()
    graph.replay()
    on_side(graph.replay, now() if is_ordered else before).synchronize()


def race_within(is_ordered: bool) -> None:
    """Two streams of one graph."""
    value, side = new(), torch.cuda.Stream()

    def body() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value.add_(1)
        if is_ordered:
            torch.cuda.current_stream().wait_stream(side)
        value.mul_(2)
        torch.cuda.current_stream().wait_stream(side)

    captured(body).replay()


def race_with_a_branch(is_ordered: bool) -> None:
    """The second stream of a graph with work that the program issues after the launch."""
    value, side = new(), torch.cuda.Stream()

    def body() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value.add_(1)
        torch.cuda.current_stream().wait_stream(side)

    graph, before = captured(body), now()
    graph.replay()
    on_side(value.clone, now() if is_ordered else before).synchronize()


RACES = [
    write_beside_a_replay,
    read_beside_a_replay,
    replay_on_two_streams,
    race_within,
    race_with_a_branch,
]


def races() -> list[list[str]]:
    from scripts.testbed.device import inside

    for race in RACES:
        race(True)
    return [inside.unordered(partial(race, False)) for race in RACES]


def test_what_nothing_orders_around_or_within_a_graph_is_told(worlds: DeviceWorlds):
    [told] = worlds.run(races, 1, timeout_s=60)
    for race, seen in zip(RACES, told, strict=True):
        assert seen and "nothing orders the two" in seen[0], (race.__name__, seen)


def read_what_a_graph_has_freed() -> bool:
    """Whether memory that a capture gives back is poison in a replay."""
    value, kept = new(), []

    def body() -> None:
        once = value * 2
        kept.append(once.data_ptr())
        total = once.sum()
        del once
        kept.append(total)

    graph = captured(body)
    graph.replay()
    copy = torch.empty_like(value)
    stream = torch.cuda.current_stream().cuda_stream
    ctypes.CDLL(None).cudaMemcpyAsync(
        ctypes.c_void_p(copy.data_ptr()), ctypes.c_void_p(kept[0]), ctypes.c_size_t(copy.nbytes),
        4, ctypes.c_void_p(stream),
    )  # fmt: skip
    return bool(copy.isnan().all().item()) and kept[1].item() == 2000


def test_what_a_graph_gives_back_within_is_poison_after_a_replay(worlds: DeviceWorlds):
    assert worlds.run(read_what_a_graph_has_freed, 1) == [True]


def drop_another_graph_in_a_capture() -> bool:
    """Whether a graph can be replayed when what was freed in its capture is given back."""
    others, value = [new()], new()
    earlier = torch.cuda.CUDAGraph()
    with torch.cuda.graph(earlier):
        others.append(others[0] * 2)
    outputs: list[torch.Tensor] = []

    def body() -> None:
        outputs.append(value * 2)
        others.clear()

    earlier.reset()
    graph = captured(body)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph.replay()
    return outputs[0].sum().item() == 2000


def test_what_a_capture_frees_of_another_graph_is_no_part_of_it(worlds: DeviceWorlds):
    assert worlds.run(drop_another_graph_in_a_capture, 1) == [True]


# ---- in the engine


def train_with_seats(sizes: ShardSizes, is_graphed: bool) -> list[float]:
    """Losses of the engine with units that have seats. With graphs: after a step, whose loss keeps
    the graph of autograd, and an evaluation, it rehearses on a stream that has not waited for them,
    warms up on one that waits for nothing, captures the blocks, and computes once more, of which
    it keeps the graph of autograd; a step later it rehearses for nothing."""
    model = new_toy()
    plans = plan_units(model, [*model.blocks])
    topology = ShardTopology(2, dist.get_rank(), sizes)
    groups = ShardGroups.create(topology, dist.group.WORLD, timedelta(seconds=60))
    plans = [replace(plan, is_seated=plan.layer.startswith("blocks")) for plan in plans]
    config = ScheduleConfig("main-thread")
    runtime = HZPRuntime(model, plans, {"dense": groups}, config, grad_scale=0.5)
    owned = [param for unit in runtime.units for param in owned_params(unit)]
    optimizer = torch.optim.AdamW(owned, lr=1e-2)
    samples = [torch.randn(4, 8, 16, device=device_of_rank(), requires_grad=True) for _ in range(3)]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    losses: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []

    def rehearse() -> None:
        side = torch.cuda.Stream()
        with runtime.rehearsing():
            with torch.cuda.stream(side):
                model.blocks[0](samples[0])
            torch.cuda.current_stream().wait_stream(side)
            blocks = tuple(model.blocks)
            torch.cuda.make_graphed_callables(blocks, tuple((one,) for one in samples))
            kept.append(model.blocks[1](samples[1]))

    for step in range(4):
        if is_graphed and step == 1:
            with torch.no_grad():
                model(toy_batch(step, 0, dist.get_rank()).to(device_of_rank()))
            has_seats = sizes.param > 1  # else parameters lie where the caller leaves them
            if not has_seats:
                aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                rehearse()
            if not has_seats:
                torch.cuda.current_stream().wait_stream(aside)
        if is_graphed and step == 2:  # when units are being gathered ahead
            with runtime.rehearsing():
                pass
        runtime.zero_grads()
        for index in range(2):
            with runtime.no_sync() if index == 0 else nullcontext():
                losses.append(
                    toy_loss(model, toy_batch(step, index, dist.get_rank()).to(device_of_rank()))
                )
                losses[-1].backward()
        runtime.sync_grads()
        optimizer.step()
        runtime.sync_params()
    runtime.close()
    return [loss.item() for loss in losses]


def seats_under_laws(laws: list[Delays]) -> list[list[list[float]]]:
    """By shard sizes, without graphs and with them under each law."""
    from scripts.testbed.device import inside

    taken_grads.LARGE_GRAD_NBYTES = 0  # gradients are taken where autograd gives them
    found = []
    for number, sizes in enumerate((ShardSizes(2, 2, 2), ShardSizes(1, 1, 2))):
        inside.set_delays(Delays(), dist.get_rank(), dist.get_world_size())
        found.append([train_with_seats(sizes, False)])
        for law in laws[number::2]:
            inside.set_delays(law, dist.get_rank(), dist.get_world_size())
            found[-1].append(train_with_seats(sizes, True))
    return found


def test_units_with_seats_are_captured_between_two_steps(worlds: DeviceWorlds):
    laws = [Delays(law, seed) for seed, law in enumerate(LAWS)]
    for found in worlds.run(seats_under_laws, 2, laws, timeout_s=120):
        for eager, *graphed in found:
            assert len(set(eager)) == 8 and graphed
            assert graphed == [eager] * len(graphed)


# ---- around units of shard()


def capture_around_units(sizes: tuple[int, int, int]) -> list[str]:
    """What is said to a graph and to torch's graphed callables of a layer within a unit, to a graph
    around the model, one around a unit's forward, to graphed callables of a unit; and to shard() of
    models with captured parts."""
    model = new_toy()
    said: list[str] = []
    tokens = toy_batch(0, 0, dist.get_rank()).to(device_of_rank())
    hidden = torch.zeros(2, 4, 16, device=device_of_rank(), requires_grad=True)
    block = model.blocks[0]
    inner = next(part for part in block.modules() if isinstance(part, nn.Linear))
    sample = torch.zeros(4, inner.in_features, device=device_of_rank(), requires_grad=True)

    def note(capture: Callable[[], object]) -> None:
        try:
            capture()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    with shard(model, model.blocks, ShardSizes(*sizes), new_adamw):
        note(lambda: captured(lambda: inner(sample)))
        note(lambda: torch.cuda.make_graphed_callables(inner, (sample,)))
        torch.cuda.synchronize()  # it was left in the middle
        note(lambda: captured(lambda: model(tokens)))
        note(lambda: captured(lambda: block(hidden)))
        note(lambda: torch.cuda.make_graphed_callables(block, (hidden,)))
    for keep in (
        lambda model: torch.cuda.make_graphed_callables(model.blocks[1], (hidden,)),
        lambda model: torch.cuda.make_graphed_callables(model.blocks[1].norm, (hidden,)),
        lambda model: setattr(model.blocks[1], "kept", {"graphs": [captured(lambda: hidden * 2)]}),
        lambda model: setattr(
            model.blocks[1],
            "kept",
            torch.cuda.make_graphed_callables(model.blocks[1].norm.forward, (hidden,)),
        ),
    ):
        model = new_toy()
        keep(model)
        note(partial(shard, model, model.blocks, ShardSizes(*sizes), new_adamw))
    return said


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 2)])
def test_graphs_around_units_of_the_library_are_refused_by_name(worlds: DeviceWorlds, sizes):
    for said in worlds.run(capture_around_units, 2, sizes, timeout_s=90):
        *inner, model, block, graphed = said[:5]
        for line in (model, block):
            assert "is called while a CUDA graph is captured" in line and "\n" not in line
        assert "must not have hooks" in graphed
        for line in inner:
            assert line.startswith("ConfigurationError: blocks.0.up.weight") and "\n" not in line
        assert len(said) == 9
        for line in said[5:]:
            assert line.startswith("ConfigurationError: blocks.1") and "\n" not in line
            assert "has a captured graph, which reads parameters where they lie now" in line
