# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Devices without hardware that find races: streams are vector clocks, every torch operation is
noted as reads and writes of memory on the current stream.

Two accesses to the same bytes, one of them a write, race unless something orders them. Which of
them came first in this run does not count: a stream, or a thread, may be late by any time.

Memory that is freed is used again by the stream that allocated it: torch's caching allocator gives
it to the next allocation of that stream, whoever else still uses it. So each allocation races with
what other streams do, in any order, with memory that this stream's was and that was freed.
"""

import threading
import time
from bisect import bisect, insort
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_asynchzp.engine.comm.collectives import Steps, completed
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.task import Task
from tests.support.engine import on_submit

Clock = dict[str, int]
"""How many accesses of each stream have happened."""

_DEFAULT_STREAM = "main"
# These do not look at a tensor's elements.
# fmt: off
_SHAPE_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros",
               "new_ones", "new_full", "new_empty_strided", "is_pinned"}
# fmt: on


class Access(NamedTuple):
    """The latest of its kind: what read or wrote the bytes [start, stop), and when."""

    what: str
    stream: str
    count: int
    is_write: bool
    start: int
    stop: int

    def conflicts_with(self, other: "Access") -> bool:
        overlaps = self.start < other.stop and other.start < self.stop
        return overlaps and (self.is_write or other.is_write)


@dataclass(frozen=True)
class Group:
    """Stands for a process group over `ranks`, for one purpose. As with NCCL, its collectives run
    on a stream of its own, which has its name."""

    purpose: str
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.purpose} over {self.ranks}"


class _Owned(NamedTuple):
    """A storage that torch has not freed yet, so far as seen: what allocated it, and where."""

    storage: StorageWeakRef
    what: str
    stream: str


class Collective(NamedTuple):
    """What was issued: the operation, over which group, on how many elements."""

    operation: str
    group: Group
    numel: int


class RecordingDevice:
    """The interface of engine/device.py. races: one sentence for each that was found."""

    torch_device = torch.device("cpu")
    runs_ahead = True

    def __init__(self):
        self.races: list[str] = []
        self.collectives: list[Collective] = []
        self.num_accesses = 0
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._clocks: dict[str, Clock] = {}
        self._num_streams = 0
        self._labels: dict[int, str] = {}
        self._accesses: dict[int, dict[tuple, Access]] = {}
        self._allocations: list[tuple[int, int]] = []  # start and end, sorted, none overlap
        self._owned: dict[int, _Owned] = {}  # by address
        self._freed: dict[str, list[tuple[_Owned, list[Access]]]] = {}  # by stream

    # ---- the interface

    def new_stream(self) -> str:
        self._num_streams += 1
        return f"stream {self._num_streams}"

    @contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        before, self._thread.stream = self._current(), stream
        try:
            yield
        finally:
            self._thread.stream = before

    def record_event(self) -> Clock:
        self._notice_frees()
        return self.now()

    def wait_event(self, event: Clock | None) -> None:
        self._notice_frees()  # they came before this wait
        if event is not None:
            self.order(event, self._current())

    def wait_work(self, work: "FinishedLater", limit_s: float, is_over=None) -> None:
        work.wait()

    def synchronize(
        self, event: Clock | None, limit_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        self.wait_event(event)  # what is issued from now on comes after it, on any stream
        return True

    def is_capturing(self) -> bool:
        return False

    def has_passed(self, event: Clock | None) -> bool:
        return True

    def new_host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def bind_thread(self) -> None:
        """Note what this thread does, too."""
        self._noting().__enter__()  # to the end of the thread

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    # ---- what is recorded

    def _current(self) -> str:
        # As with cuda, a new thread is on the same default stream as all others.
        return getattr(self._thread, "stream", _DEFAULT_STREAM)

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})

    def now(self) -> Clock:
        """All that happens before what the current stream gets next."""
        with self._lock:
            return dict(self._clock(self._current()))

    def order(self, event: Clock, stream: str) -> None:
        """Whatever `stream` gets from now on happens after `event`."""
        with self._lock:
            clock = self._clock(stream)
            for other, count in event.items():
                clock[other] = max(clock.get(other, 0), count)

    def label(self, tensor: torch.Tensor, name: str) -> None:
        """Call the memory of `tensor` by `name` in messages."""
        self._labels[self._extent(tensor)[0]] = name

    def operate(self, what: str, tensor: torch.Tensor, is_write: bool, stream=None) -> None:
        """`what` reads or writes `tensor` on `stream`, or the current one."""
        stream = stream or self._current()
        self._notice_frees()
        with self._lock:
            memory, start, stop = self._extent(tensor)
            if start == stop:
                return
            self.num_accesses += 1
            clock = self._clock(stream)
            clock[stream] = clock.get(stream, 0) + 1
            access = Access(what, stream, clock[stream], is_write, start, stop)
            known = self._accesses.setdefault(memory, {})
            for other in known.values():
                if access.conflicts_with(other) and other.count > clock.get(other.stream, 0):
                    self.races.append(self._describe(memory, other, access))
            # Earlier ones of this stream are before whatever the latest is before.
            known[stream, is_write, start, stop] = access

    def allocate(self, what: str, tensor: torch.Tensor) -> None:
        """`tensor` is new: what was at its address before is gone. The allocator hands out memory
        that earlier work of the current stream may still use, so this is a write.
        """
        storage = tensor.untyped_storage()
        start, stop = storage.data_ptr(), storage.data_ptr() + max(storage.nbytes(), 1)
        self._notice_frees()
        with self._lock:
            self._take_freed(self._current())
            self._owned[start] = _Owned(StorageWeakRef(storage), what, self._current())
            for memory, end in [one for one in self._allocations if one[0] < stop]:
                if start < end:
                    self._allocations.remove((memory, end))
                    self._accesses.pop(memory, None)
                    self._labels.pop(memory, None)
            insort(self._allocations, (start, stop))
        self.operate(what, tensor, is_write=True)

    def _notice_frees(self) -> None:
        """What lost its last owner since this was last called is there for the next allocation of
        the stream that allocated it."""
        with self._lock:
            freed = [start for start, owned in self._owned.items() if owned.storage.expired()]
            for start in freed:
                owned = self._owned.pop(start)
                accesses = list(self._accesses.pop(start, {}).values())
                self._freed.setdefault(owned.stream, []).append((owned, accesses))

    def _take_freed(self, stream: str) -> None:
        """`stream` allocates: it may get all that it has allocated before and that was freed."""
        clock = self._clock(stream)
        for owned, accesses in self._freed.pop(stream, []):
            for access in accesses:
                if access.stream != stream and access.count > clock.get(access.stream, 0):
                    self.races.append(
                        f"memory that {owned.what} took on {stream} is free for the next there, "
                        f"{access.what} still uses it on {access.stream}"
                    )

    def _extent(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """The allocation it lies in, and the bytes from its first to its last element.

        Several storages may lie in one allocation, and overlap.
        """
        pointer = memory = tensor.untyped_storage().data_ptr()
        index = bisect(self._allocations, (pointer + 1,)) - 1
        if index >= 0 and pointer < self._allocations[index][1]:
            memory = self._allocations[index][0]
        if tensor.numel() == 0:
            return memory, 0, 0
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        start, size = tensor.storage_offset(), tensor.element_size()
        offset = pointer - memory
        return memory, offset + start * size, offset + (start + last + 1) * size

    def _describe(self, memory: int, first: Access, second: Access) -> str:
        does = [
            f"{a.what} {'writes' if a.is_write else 'reads'} it on {a.stream}"
            for a in (first, second)
        ]
        name = self._labels.get(memory, "unnamed memory")
        return f"{name}: {does[0]}, {does[1]}, and neither waits for the other"

    def attend(self, driver: Driver) -> None:
        """`driver` runs on this device: what orders its threads is recorded from now on."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what this thread does, and put recorded collectives in place of torch's."""
        with (
            # The engine takes its own operations out of the modes of a model. This mode is to see
            # them: memory that it does not see taken is taken for that of what lay there before.
            mock.patch("megatron_asynchzp.engine.zero.autograd._without_modes", nullcontext),
            mock.patch(
                "megatron_asynchzp.engine.comm.collectives.all_gather_flat", self._all_gather
            ),
            mock.patch(
                "megatron_asynchzp.engine.comm.collectives.reduce_scatter_flat",
                self._reduce_scatter,
            ),
            mock.patch("torch.distributed.all_reduce", self._all_reduce),
            mock.patch("torch.distributed.all_to_all_single", self._all_to_all),
            self._noting(),
        ):
            yield

    def _noting(self) -> AbstractContextManager:
        return _Noting(self)

    # ---- collectives

    def _issue(
        self, operation: str, group: Group, read: torch.Tensor, written: torch.Tensor
    ) -> "FinishedLater":
        self.order(self.now(), group.name)
        self.collectives.append(Collective(operation, group, written.numel()))
        self.operate(operation, read, is_write=False, stream=group.name)
        self.operate(operation, written, is_write=True, stream=group.name)
        with self._lock:
            return FinishedLater(self, dict(self._clock(group.name)))

    def _all_gather(self, full, shard, group, async_op):
        assert async_op  # or the thread that issues it would wait for the others
        return self._issue("all-gather", group, shard, full)

    def _reduce_scatter(self, shard, full, group, async_op):
        assert async_op
        return self._issue("reduce-scatter", group, full, shard)

    def _all_reduce(self, tensor, op=None, group=None, async_op=False):
        return self._issue("all-reduce", group, tensor, tensor)

    def _all_to_all(
        self, received, sent, received_splits=(), sent_splits=(), group=None, async_op=False
    ):
        return self._issue("all-to-all", group, sent, received)


class CountingDevice(RecordingDevice):
    """Finds no races: collectives are recorded, accesses are not, which takes most of the time."""

    def _noting(self) -> AbstractContextManager:
        return nullcontext()


class RecordingHost(RecordingDevice):
    """As a CPU: nothing runs ahead and every thread is a stream of its own. What orders threads is
    that a task starts after it was submitted, and that a thread which awaits it goes on after its
    end.
    """

    runs_ahead = False

    def _notice_frees(self) -> None:
        """Whoever works on memory on a CPU owns it, until the work is done."""

    def new_stream(self) -> None:
        return None

    def _current(self) -> str:
        return threading.current_thread().name

    @contextmanager
    def on_stream(self, stream: None) -> Iterator[None]:
        yield

    def record_event(self) -> None:
        return None

    def attend(self, driver: Driver) -> None:
        on_submit(driver, self._attend_task)

    def _attend_task(self, task: Task) -> None:
        start, await_usable = task.start, task.await_usable
        before: Clock = self.now()
        after: Clock = {}

        def attended_start() -> Steps:
            nonlocal after
            self.order(before, self._current())
            yield from completed(start())
            after = self.now()
            return None

        def attended_wait() -> None:
            await_usable()
            self.order(after, self._current())

        task.start, task.await_usable = attended_start, attended_wait


class FinishedLater:
    """The handle of a collective: `wait` orders the current stream after it, as NCCL's does."""

    def __init__(self, device: RecordingDevice, end: Clock):
        self._device, self._end = device, end

    def wait(self) -> None:
        self._device.order(self._end, self._device._current())

    def is_completed(self) -> bool:
        return True


class _Noting(TorchDispatchMode):
    """Passes on what every torch operation of this thread reads, writes and allocates."""

    def __init__(self, device: RecordingDevice):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        name = func.overloadpacket.__name__
        given = [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])]
        known = set()
        for argument, value in zip(func._schema.arguments, given):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                known.add(tensor.untyped_storage().data_ptr())
                if is_write or name not in _SHAPE_ONLY:
                    self._device.operate(name, tensor, is_write)
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self._device.allocate(name, tensor)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
