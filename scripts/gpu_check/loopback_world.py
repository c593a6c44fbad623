# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A world in one process: it is one rank, and all other ranks are taken to hold the same data.

So the sum over n ranks is n times this rank's tensor, which is exact for a power of two, and what
the others hold of a parameter is known from a plain process that trains meanwhile. What a
collective results in is computed during the training, after a random delay, and then written: on a
GPU by NCCL (on an NPU by HCCL), which gets a communicator of one rank for each of this world; on a
CPU by a thread.
"""

import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import all_gather_flat, completed
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.sharding.topology import MeshAxis, ShardSizes, ShardTopology
from megatron_asynchzp.engine.zero.unit import HZPUnit

# _sleep of a device's module counts its cycles; about a nanosecond each on what GPUs there are.
# CANN does not say how long an NPU's are.
_CYCLES_PER_S = 1.5e9
_ENDLESS_S = 3600.0
BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}


class LoopbackWorld:
    """`rank` of `size` ranks with equal data.

    longest_delay_s: of a collective, drawn anew for each; endless: no collective that is issued
    after this is set ever ends.
    """

    def __init__(self, device: torch.device, size: int, rank: int, longest_delay_s: float, seed=0):
        self.device, self.size, self.rank = device, size, rank
        self.endless = False
        self._longest_delay_s, self._random = longest_delay_s, random.Random(seed)
        self._issued_by = threading.local()
        self._units: dict[str, HZPUnit] = {}
        self._held: dict[str, torch.Tensor] = {}  # what the parameter shards of all ranks hold
        self._updated: dict[str, torch.Tensor] = {}  # and will hold after the next param-sync
        self._outdated: list[dict[str, torch.Tensor]] = []
        self._lanes: dict[tuple, _Lane] = {}

    def groups(self, sizes: tuple[int, int, int]) -> ShardGroups:
        """The communicators of this rank."""
        topology = ShardTopology(self.size, self.rank, ShardSizes(*sizes))
        axes = {tuple(axis.members): axis for axis in topology.axes}

        def group_of(purpose: str, ranks: tuple[int, ...]) -> "LoopbackGroup":
            key = (purpose, ranks)
            if key not in self._lanes:
                self._lanes[key] = new_lane(self.device, len(self._lanes))
            return LoopbackGroup(self, axes[ranks], self._lanes[key])

        return ShardGroups.of_topology(topology, range(self.size), group_of)

    def attend(self, driver: Driver, units: Sequence[HZPUnit], params: Mapping[str, torch.Tensor]):
        """Serve the tasks of `driver` from now on.

        params: each parameter of `units`, whole, as it is now.
        """
        self._units = {unit.name: unit for unit in units}
        self._held = self._updated = self._flat(params)
        if self.device.type != "cpu":
            # The engine's first gathers wait for what it has written itself, which was earlier.
            torch.get_device_module(self.device).synchronize(self.device)
        submit = driver.submit

        def attended_submit(task: Task) -> Task:
            task.start = partial(self._note_issuer, task.lane, task.unit, task.start)  # pyright: ignore[reportAttributeAccessIssue]
            return submit(task)

        driver.submit = attended_submit

    def update(self, params: Mapping[str, torch.Tensor]) -> None:
        """Before `sync_params`: what the optimizers of all ranks have made of each parameter."""
        self._outdated.append(self._updated)  # streams may still read it
        self._updated = self._flat(params)

    def _flat(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: flat_of(unit, params, unit.dtype) for name, unit in self._units.items()}

    def _note_issuer(self, lane: str, name: str, start: Callable[[], Iterator]) -> Iterator:
        """The collectives of a task, which can ask whose they are."""
        steps = completed(start())  # pyright: ignore[reportArgumentType]
        while True:
            self._issued_by.task = (lane, name)
            work = next(steps, None)
            self._issued_by.task = None
            if work is None:
                break
            yield work
        if lane == "param-sync":
            # The other ranks' shards are written where and when this rank's own is.
            self._held[name].copy_(self._updated[name])

    # ---- for the groups

    def issue(
        self, lane: "_Lane", output: torch.Tensor, result: Callable[[], torch.Tensor]
    ) -> dist.Work:
        """A collective that writes to `output` what `result()` computes."""
        delay_s = self._random.uniform(0.0, self._longest_delay_s)
        with torch.no_grad():
            return lane.issue(_ENDLESS_S if self.endless else delay_s, output, result)

    def of_all_ranks(self, axis: MeshAxis, numel: int) -> torch.Tensor:
        """What an all-gather along `axis` makes, 1-D of `numel` elements."""
        task = getattr(self._issued_by, "task", None)
        if task is None:
            raise RuntimeError("an all-gather outside a task: whose parameters?")
        lane, name = task
        unit = self._units[name]
        range_ = unit.groups.topology.shard_range(axis.stride, unit.layout.padded_numel)
        source = (self._updated if lane == "param-sync" else self._held)[name]
        if range_.numel != numel:
            raise RuntimeError(f"{lane} of {name}: gathers {numel} elements, not {range_.numel}")
        return source[range_.start : range_.stop]

    def close(self) -> None:
        """End the threads, if there are any."""
        for lane in self._lanes.values():
            lane.close()


def flat_of(unit: HZPUnit, values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """`values`, by parameter, as the unit lays them out: 1-D, padding zero."""
    flat = torch.zeros(unit.layout.padded_numel, dtype=dtype, device=unit.device)
    for piece in unit.layout.slices:
        flat[piece.range.start : piece.range.stop].copy_(values[piece.name].detach().flatten())
    return flat


class LoopbackGroup(dist.ProcessGroup):
    """The communicator along one axis."""

    def __init__(self, world: LoopbackWorld, axis: MeshAxis, lane: "_Lane"):
        super().__init__(axis.coordinate, axis.size)  # pyright: ignore[reportCallIssue]
        self._world, self._axis, self._lane = world, axis, lane

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None):
        whole = self._world.of_all_ranks(self._axis, output.numel())
        start = self._axis.coordinate * input.numel()
        stop = start + input.numel()

        def result() -> torch.Tensor:
            return torch.cat([whole[:start], input, whole[stop:]])

        return self._world.issue(self._lane, output, result)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None):
        own = input[self._axis.coordinate * output.numel() :][: output.numel()]
        return self._world.issue(self._lane, output, lambda: own * self._axis.size)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None):
        (tensor,) = tensors
        is_sum = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        factor = self._axis.size if is_sum else 1  # the largest of equal numbers is each of them
        return self._world.issue(self._lane, tensor, lambda: tensor * factor)

    # torch before 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType]


# ---- collectives during the computation


class _StreamLane:
    """A communicator of NCCL with one rank, and a stream before it.

    Each collective comes after the work that the caller's stream had before it. It reads on that
    stream; NCCL writes on its own.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup):
        self._device, self._module = device, torch.get_device_module(device)
        self._stream, self._group = self._module.Stream(device), group
        self._last: tuple[dist.Work, torch.Tensor] | None = None

    def issue(
        self, delay_s: float, output: torch.Tensor, result: Callable[[], torch.Tensor]
    ) -> dist.Work:
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            self._let_go_of_source()
            sleep_on_stream(delay_s, self._device)
            source = result()
            work = all_gather_flat(output, source, group=self._group, async_op=True)
            self._last = work, source
            return work

    def _let_go_of_source(self) -> None:
        """What NCCL read is memory of this stream: it is free when this stream knows so."""
        if self._last is not None:
            self._last[0].wait()
            self._last = None

    def close(self) -> None:
        with self._module.stream(self._stream):
            self._let_go_of_source()


@cache
def _group_of_one(index: int, backend: str) -> dist.ProcessGroup:
    """The communicators of this process, which all its worlds share: to make one takes time."""
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    return group


def sleep_on_stream(seconds: float, device: torch.device) -> None:
    """The current stream does nothing for about so long."""
    if seconds > 0:
        torch.get_device_module(device)._sleep(int(seconds * _CYCLES_PER_S))


class _ThreadLane:
    """A thread: each collective comes after those before it."""

    def __init__(self):
        self._works: queue.SimpleQueue[_ThreadWork | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def issue(
        self, delay_s: float, output: torch.Tensor, result: Callable[[], torch.Tensor]
    ) -> dist.Work:
        work = _ThreadWork(delay_s, lambda: output.copy_(result()))
        self._works.put(work)
        return work

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A function of its own: nothing here may hold on to the tensors until the next one comes.
        work = self._works.get()
        if work is None:
            return False
        self._is_closed.wait(work.delay_s)
        with torch.no_grad():
            work.run()
        return True

    def close(self) -> None:
        self._is_closed.set()
        self._works.put(None)


class _ThreadWork(dist.Work):
    """As gloo's: `wait` holds the host, and raises where the time is over."""

    def __init__(self, delay_s: float, act: Callable[[], Any]):
        super().__init__()
        self.delay_s, self._act = delay_s, act
        self._is_done = threading.Event()

    def run(self) -> None:
        act, self._act = self._act, _nothing
        act()
        del act
        self._is_done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_done.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("the collective has not completed within its time")
        return True

    def is_completed(self) -> bool:
        return self._is_done.is_set()


def _nothing() -> None:
    pass


_Lane = _StreamLane | _ThreadLane


def new_lane(device: torch.device, index: int) -> _Lane:
    """The `index`-th lane of a world."""
    if device.type == "cpu":
        return _ThreadLane()
    return _StreamLane(device, _group_of_one(index, BACKENDS[device.type]))
