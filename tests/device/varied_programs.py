# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What two ranks train on an emulated device: together these programs pass every place at which the
engine waits, records an event, launches or takes memory."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ScheduleConfig, ShardedModel, ShardSizes, shard
from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.order_check import OrderMismatch
from megatron_asynchzp.engine.device import device_of
from megatron_asynchzp.engine.sharding.topology import ShardTopology
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.early_update import EarlyUpdate
from megatron_asynchzp.engine.zero.step import KeepBudgets
from scripts.testbed.contenders.adam import owned_params
from scripts.testbed.device.delays import Delays
from tests.device.programs import CLIP, Seen, device_of_rank, new_adamw, steps_of
from tests.support.engine import shard_model
from tests.support.toy_models import Block, ToyLM, toy_batch, toy_loss


class Program(NamedTuple):
    """name: what is special about it; train: on every rank, returns what it has seen."""

    name: str
    train: Callable[[], Seen]


_WIDTH = 16  # of a ToyLM


class _SideBlock(Block):
    """A part is computed on a stream of its own, as Megatron's shared experts are."""

    def __init__(self, width: int):
        super().__init__(width)
        self.shared = nn.Linear(width, width)
        self._side: torch.cuda.Stream | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        self._side = side = self._side or torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            shared = self.shared(x)
        x.record_stream(side)
        main.wait_stream(side)
        shared.record_stream(main)
        return super().forward(x) + shared


class _PartlyUsedBlock(Block):
    """Nothing computes with its first and its last parameters, which get no gradient."""

    def __init__(self, width: int):
        super().__init__(width)
        self.first = nn.Parameter(torch.ones(width, width))
        self.last = nn.Linear(width, width)


class _ViewingBlock(Block):
    """Keeps a view of a weight where neither autograd nor the engine sees it: in no module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _KEPT[id(self)] = self.up.weight.data[0]
        return super().forward(x)


_KEPT: dict[int, torch.Tensor] = {}


def _new_model(blocks: Sequence[type[Block]] = 3 * (Block,), recomputes: bool = False) -> ToyLM:
    torch.manual_seed(0)
    model = ToyLM(depth=0, recompute=recomputes)
    model.blocks.extend(block(_WIDTH) for block in blocks)
    return model.to(device_of_rank())


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        toy_loss(model, toy_batch(0, 0, dist.get_rank()).to(device_of_rank()))


def _clip_step_and_evaluate(sharded: ShardedModel) -> torch.Tensor:
    norm = sharded.clip_grad_norm_(CLIP)
    sharded.step()
    _evaluate(sharded.model)
    return norm


def _save(sharded: ShardedModel) -> torch.Tensor:
    norm = sharded.clip_grad_norm_(CLIP)
    sharded.step()
    sharded.state_dict()
    return norm


def _save_and_load(sharded: ShardedModel) -> torch.Tensor:
    norm = sharded.clip_grad_norm_(CLIP)
    sharded.step()
    sharded.load_state_dict(sharded.state_dict())
    with sharded.changing_params():
        pass
    for _, values in sharded.full_params():
        norm = norm + 1e-3 * values.float().norm()
    return norm


def _submit_in_another_order(sharded: ShardedModel) -> torch.Tensor:
    """Rank 1 has submitted something else, which every rank must be told."""
    if dist.get_rank() == 1:
        sharded.runtime.driver.submitted.entries.append("nothing that rank 0 knows")
    try:
        sharded.clip_grad_norm_(CLIP)
        sharded.runtime.settle()
    except OrderMismatch as mismatch:
        raise _Told(str(mismatch)) from None
    raise AssertionError("nobody has noticed the other order")


class _Told(Exception):
    """What the comparison of orders said."""


def _differing_order() -> Program:
    def train() -> Seen:
        model = _new_model()
        try:
            sizes = ShardSizes(2, 2, 2)
            with shard(model, model.blocks, sizes, new_adamw) as sharded:
                steps_of(
                    model,
                    1,
                    sharded.zero_grad,
                    sharded.set_is_last_micro_batch,
                    lambda: _submit_in_another_order(sharded),
                )
        except _Told as told:
            return [(float(zlib.crc32(str(told).encode())), 0.0)]
        raise AssertionError("not reached")

    return Program("an order that differs", train)


def _begin_twice(sharded: ShardedModel) -> None:
    """A step is given up after its backward: the gradients that are on their way are of no use."""
    sharded.zero_grad()
    sharded.set_is_last_micro_batch(True)
    toy_loss(sharded.model, toy_batch(7, 0, dist.get_rank()).to(device_of_rank())).backward()
    sharded.zero_grad()


def _library(
    name: str,
    sizes: tuple[int, int, int],
    num_micro_batches: int = 2,
    blocks: Sequence[type[Block]] = 3 * (Block,),
    recomputes: bool = False,
    dtype: torch.dtype = torch.float32,
    begin: Callable[[ShardedModel], None] = ShardedModel.zero_grad,
    end: Callable[[ShardedModel], torch.Tensor] = _clip_step_and_evaluate,
    **schedule: object,
) -> Program:
    """The library, as a training loop of torch uses it."""

    def train() -> Seen:
        model = _new_model(blocks, recomputes).to(dtype)
        config = ScheduleConfig(**schedule)  # pyright: ignore[reportArgumentType]
        with shard(model, model.blocks, ShardSizes(*sizes), new_adamw, schedule=config) as sharded:
            return steps_of(
                model,
                num_micro_batches,
                lambda: begin(sharded),
                sharded.set_is_last_micro_batch,
                lambda: end(sharded),
            )

    return Program(f"{name}, sizes {sizes}", train)


def _engine(
    name: str, sizes: tuple[int, int, int], wire: torch.dtype, sends_early: bool
) -> Program:
    """The engine below the library, as Megatron's plugin uses it, with parameters in bf16."""

    def train() -> Seen:
        model = _new_model().to(torch.bfloat16)
        runtime = shard_model(model, sizes, groups=_groups_of(sizes, wire))
        owned = {unit: owned_params(unit) for unit in runtime.units}
        optimizer = new_adamw([param for params in owned.values() for param in params])
        early = EarlyUpdate(optimizer, owned, is_forced=True)
        if sends_early:
            runtime.early_sends.early_update = early

        def mark(is_last: bool) -> None:
            runtime.is_last_micro_batch = is_last

        def end() -> torch.Tensor:
            runtime.sync_grads()
            optimizer.step()
            runtime.sync_params(skip_unchanged=runtime.step % 2 == 1)
            return _norm_of(param.detach() for params in owned.values() for param in params)

        try:
            return steps_of(model, 2, runtime.zero_grads, mark, end)
        finally:
            runtime.close()

    return Program(f"{name}, sizes {sizes}", train)


def _two_chunks(name: str, sizes: tuple[int, int, int]) -> Program:
    """Two models of one rank, as the chunks of a pipeline: they share a driver and the memory of
    what they keep, and the one that was built last is used first."""

    def train() -> Seen:
        device = device_of_rank()
        config = ScheduleConfig(keep_params_nbytes=1 << 14)
        driver = start_driver(config, device_of(torch.zeros((), device=device)))
        budgets = KeepBudgets.of(config, driver)
        groups = _groups_of(sizes, torch.float32)
        models = [_new_model(), _new_model()]
        runtimes = [
            shard_model(model, sizes, config, driver, budgets=budgets, groups=groups)
            for model in models
        ]
        optimizers = [
            new_adamw([param for unit in runtime.units for param in owned_params(unit)])
            for runtime in runtimes
        ]

        def each(call: Callable[[HZPRuntime], object]) -> None:
            for runtime in reversed(runtimes):
                call(runtime)

        def mark(is_last: bool) -> None:
            for runtime in runtimes:
                runtime.is_last_micro_batch = is_last

        def end() -> torch.Tensor:
            each(HZPRuntime.sync_grads)
            for optimizer in optimizers:
                optimizer.step()
            each(HZPRuntime.sync_params)
            groups_of_params = (one.param_groups[0]["params"] for one in optimizers)
            return _norm_of(param.detach() for params in groups_of_params for param in params)

        try:
            both = _Both(*reversed(models))
            return steps_of(both, 2, lambda: each(HZPRuntime.zero_grads), mark, end)
        finally:
            each(HZPRuntime.close)
            driver.close()

    return Program(f"{name}, sizes {sizes}", train)


class _Both(nn.Module):
    """The sum of what two models say."""

    def __init__(self, first: ToyLM, second: ToyLM):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.first(tokens) + self.second(tokens)


def _groups_of(sizes: tuple[int, int, int], wire: torch.dtype) -> ShardGroups:
    topology = ShardTopology(dist.get_world_size(), dist.get_rank(), ShardSizes(*sizes))
    return ShardGroups.create(topology, dist.group.WORLD, grad_dtype=wire)


def _norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


PROGRAMS = (
    _library("every step timed", (1, 2, 2), timed_every=1),
    _library("recomputation, two units ahead", (2, 2, 2), recomputes=True, prefetch_depth=2),
    _library("parameters kept", (2, 2, 2), 3, keep_params_nbytes=1 << 14),
    _library(
        "gradients kept and cut", (2, 2, 2), 3, keep_grads_nbytes=1 << 14, grad_slot_nbytes=2048
    ),
    _library("a side stream", (2, 2, 2), blocks=3 * (_SideBlock,)),
    _library("a part is not used", (2, 2, 2), blocks=3 * (_PartlyUsedBlock,)),
    _library(
        "a part is not used, gradients cut",
        (2, 2, 2),
        blocks=3 * (_PartlyUsedBlock,),
        grad_slot_nbytes=2048,
    ),
    _library("views kept", (2, 2, 2), blocks=3 * (_ViewingBlock,)),
    _library("views kept by one layer", (2, 2, 2), blocks=(_ViewingBlock, _SideBlock, _SideBlock)),
    _library("saved and loaded", (1, 1, 2), end=_save_and_load),
    _library("saved and loaded, bf16", (2, 2, 2), dtype=torch.bfloat16, end=_save_and_load),
    _library("one layer", (1, 2, 2), 3, blocks=(Block,)),
    _library("steps given up", (1, 2, 2), begin=_begin_twice),
    _library("steps given up", (2, 2, 2), begin=_begin_twice),
    # Without the comparison, for which the host waits whenever nothing is to be in flight.
    _library("saved, bf16", (2, 2, 2), dtype=torch.bfloat16, end=_save, checks_order=False),
    _differing_order(),
    _library("nothing beside the computation", (2, 2, 2), kind="inline"),
    _library("nothing beside the computation", (1, 1, 2), kind="inline"),
    _two_chunks("two chunks", (2, 2, 2)),
    _engine("gradients travel in bf16", (2, 2, 2), torch.bfloat16, False),
    _engine("gradients travel in bf16", (1, 1, 2), torch.bfloat16, False),
    _engine("replicas, gradients travel in bf16", (1, 1, 1), torch.bfloat16, False),
    _engine("sent before the update", (1, 2, 2), torch.float32, True),
    _engine("sent before the update", (1, 1, 2), torch.float32, True),
    _engine("replicas, sent before the update", (1, 1, 1), torch.float32, True),
)


LAWS = [Delays(), Delays("uniform", 1), Delays("slow-stream", 2), Delays("on-demand", 3)]


def train_each_under(laws: Sequence[Delays]) -> list[list[Seen]]:
    """Every program under each law."""
    from scripts.testbed.device import inside

    results = []
    for law in laws:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        results.append([program.train() for program in PROGRAMS])
    return results


def assert_no_delay_changes_a_bit(of_laws: Sequence[Sequence[Seen]]) -> None:
    """of_laws: what one rank saw."""
    without, *others = of_laws
    for law, seen in zip(LAWS[1:], others, strict=True):
        for program, found, expected in zip(PROGRAMS, seen, without, strict=True):
            assert found == expected, (program.name, str(law))
