# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of the device path, made by rule: what the engine asks of streams, events and memory is
left out or done wrong at one place of the program at a time. For ranks on the emulated device.

A place is what asks: which wait of a task of which lane, which function. A run notes all places,
and each is broken in a run of its own; so code that moves needs no new mutant.
"""

import faulthandler
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.comm.main_thread_driver import MainThreadDriver
from megatron_asynchzp.comm.task import Task
from megatron_asynchzp.device import StreamDevice
from megatron_asynchzp.sharding.memory_map import MemoryMap
from megatron_asynchzp.zero.reductions import Reductions
from scripts.testbed.device.delays import Delays
from tests.device.programs import Seen
from tests.mutants.device_programs import PROGRAMS

NO_WAIT = "a stream does not wait"
NO_HOST_WAIT = "the host does not wait"
NO_COLLECTIVE_WAIT = "a handle is dropped"
EARLY = "an event is recorded early"
ELSEWHERE = "an event is recorded on another stream"
NO_LANE = "a task runs on a stream of its own"
FOREIGN_MEMORY = "memory is taken from another stream"
FREED = "memory is freed at once"
REUSED = "memory is reused without its last users"
UNNOTED = "a user of memory is not noted"
UNWRITTEN = "memory is left as it was found"
SWAPPED = "rank 1 submits it after the next"
RELAUNCHED = "rank 1 launches it after the next, and says nothing"
PRIORITY = "a stream has no priority"
KINDS = (
    NO_WAIT,
    NO_HOST_WAIT,
    NO_COLLECTIVE_WAIT,
    EARLY,
    ELSEWHERE,
    NO_LANE,
    FOREIGN_MEMORY,
    FREED,
    REUSED,
    UNNOTED,
    UNWRITTEN,
    SWAPPED,
    RELAUNCHED,
    PRIORITY,
)


class Fault(NamedTuple):
    """what: one of KINDS; place: where."""

    what: str
    place: str

    @property
    def environment(self) -> dict[str, str]:
        """Of the ranks. Where each stream has a hardware queue of its own, collectives of different
        communicators may be launched in any order."""
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.what == RELAUNCHED else {}


# ---- places

_LOWEST = ("driver.", "device.", "timeline.")  # modules that ask for others


class _Caller(NamedTuple):
    """Who asks: functions of the engine, innermost first; those of a task with their task; those
    within a task's steps, and those that call the task."""

    tasks: list[tuple[str, Task]]
    within: list[str]
    outside: list[str]

    @classmethod
    def find(cls, frame: FrameType | None) -> "_Caller":
        found = cls([], [], [])
        while frame is not None:
            name, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            if name.startswith("megatron_asynchzp.") and not function.startswith("<"):
                owner, text = frame.f_locals.get("self"), f"{name.rpartition('.')[2]}.{function}"
                if isinstance(owner, Task):
                    found.tasks.append((function, owner))
                elif not text.startswith(_LOWEST):
                    (found.outside if found.tasks else found.within).append(text)
            frame = frame.f_back
        return found

    @property
    def text(self) -> str:
        """The two innermost functions; of a task its lane and the innermost one."""
        if not self.tasks:
            return " in ".join(self.within[:2])
        function, task = self.tasks[0]
        return f"{task.lane}: {self.within[0] if self.within else function}"

    @property
    def waiting(self) -> str:
        """Who waits for the innermost task: the task that is issued, or the function that reads."""
        for function, task in self.tasks[1:]:
            if function == "issue":
                return task.lane
        return " in ".join(self.outside[:2])

    def count(self, what: str) -> int:
        """How often `what` was asked within the innermost task before."""
        counts = self.tasks[0][1].__dict__.setdefault("_asked", Counter())
        counts[what] += 1
        return counts[what] - 1


def _wait_place(caller: _Caller) -> str:
    if not caller.tasks:
        return caller.text
    function, task = caller.tasks[0]
    if function == "issue":  # all but the first of a gather are the last users of its memory
        return f"{task.lane}: ready[{min(caller.count(NO_WAIT), 1)}]"
    return f"{caller.waiting}: after {task.lane}"


def _work_place(caller: _Caller) -> str:
    functions = [function for function, _ in caller.tasks]
    lane, index = caller.tasks[0][1].lane, caller.count(NO_COLLECTIVE_WAIT)
    if "order_stream" in functions:
        return f"{caller.waiting}: after the last collective of {lane}"
    within = "issue_rest" if "issue_rest" in functions else "finish"
    return f"{lane}: collective {index}, {within}"


# ---- breaking


class Breaker:
    """Notes every place while a program runs, and breaks one of them: fault, None for none."""

    def __init__(self, fault: Fault | None):
        self.fault = fault
        self.places: dict[Fault, int] = {}
        self._earlier: dict[str, Any] = {}
        self._idle = torch.cuda.Stream()
        # Of the task submitted last, while it is the last; held: launches it, on rank 1.
        self._before: tuple[Task, str] | None = None
        self._held: Callable[[], object] | None = None

    def note(self, what: str, place: str) -> None:
        at = Fault(what, place)
        self.places[at] = self.places.get(at, 0) + 1

    def is_broken(self, what: str, place: str) -> bool:
        self.note(what, place)
        return self.fault == (what, place)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of another stream, which may still be in use there."""
        with torch.cuda.stream(self.other_stream()):
            moved = torch.empty_like(tensor)
        return moved.copy_(tensor)

    def other_stream(self) -> torch.cuda.Stream:
        current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
        return default if current != default else self._idle

    def __enter__(self) -> "Breaker":
        self._patches = ExitStack()
        for owner, name in (
            (StreamDevice, "wait_event"),
            (StreamDevice, "wait_work"),
            (StreamDevice, "record_event"),
            (StreamDevice, "synchronize"),
            (StreamDevice, "on_stream"),
            (StreamDevice, "new_stream"),
            (MemoryMap, "claim"),
            (MemoryMap, "note_user"),
            (Driver, "submit"),
            (Driver, "complete"),
            (MainThreadDriver, "complete"),
        ):
            replacement = self._method(getattr(owner, name), getattr(self, f"_{name}"))
            self._patches.enter_context(mock.patch.object(owner, name, replacement))
        # A mode is of one thread, and autograd has one for the backward of a device.
        for owner, name in ((Task, "issue"), (Task, "finish"), (Reductions, "start_reduction")):
            replacement = self._in_mode(getattr(owner, name))
            self._patches.enter_context(mock.patch.object(owner, name, replacement))
        self._patches.enter_context(_Allocations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    @staticmethod
    def _method(real: Callable[..., Any], broken: Callable[..., Any]) -> Callable[..., Any]:
        def method(owner: Any, *args: Any, **named: Any) -> Any:
            return broken(_Caller.find(sys._getframe(1)), real, owner, *args, **named)

        return method

    def _in_mode(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def method(owner: Any, *args: Any, **named: Any) -> Any:
            if any(isinstance(mode, _Allocations) for mode in _get_current_function_mode_stack()):
                return real(owner, *args, **named)
            with _Allocations(self):
                return real(owner, *args, **named)

        return method

    def _wait_event(self, caller: _Caller, real: Any, device: Any, event: Any) -> None:
        place = _wait_place(caller)
        if event is not None and not self.is_broken(NO_WAIT, place):
            real(device, event)

    def _wait_work(self, caller: _Caller, real: Any, device: Any, work: Any, *rest: Any) -> None:
        if not self.is_broken(NO_COLLECTIVE_WAIT, _work_place(caller)):
            real(device, work, *rest)

    def _record_event(self, caller: _Caller, real: Any, device: Any) -> Any:
        if self.is_broken(EARLY, caller.text):
            with torch.cuda.stream(self._idle):
                idle = real(device)
            event = self._earlier.get(caller.text, idle)
            self._earlier[caller.text] = real(device)
            return event
        if self.is_broken(ELSEWHERE, caller.text):
            with torch.cuda.stream(self.other_stream()):
                return real(device)
        return real(device)

    def _synchronize(self, caller: _Caller, real: Any, device: Any, *rest: Any) -> bool:
        return self.is_broken(NO_HOST_WAIT, caller.text) or real(device, *rest)

    def _on_stream(self, caller: _Caller, real: Any, device: Any, stream: Any) -> Any:
        frame = sys._getframe(2)
        does = "is completed" if frame.f_code.co_name == "complete" else "is issued"
        if self.is_broken(NO_LANE, f"{frame.f_locals['task'].lane}: {does}"):
            stream = torch.cuda.Stream()
        return real(device, stream)

    def _new_stream(self, caller: _Caller, real: Any, device: Any) -> Any:
        return torch.cuda.Stream() if self.is_broken(PRIORITY, "of every lane") else real(device)

    def _claim(self, caller: _Caller, real: Any, memory: Any, extent: Any) -> Any:
        users = real(memory, extent)
        return [] if users and self.is_broken(REUSED, caller.text) else users

    def _note_user(self, caller: _Caller, real: Any, memory: Any, *rest: Any) -> None:
        if not self.is_broken(UNNOTED, caller.text):
            real(memory, *rest)

    # What is held back is launched behind the next task, or where its result is needed.

    def _submit(self, caller: _Caller, real: Any, driver: Driver, task: Task) -> Task:
        if self._before is not None and self._before[0] not in task.after:
            for what in (SWAPPED, RELAUNCHED):
                self.note(what, self._before[1])
        place = f"{task.lane}: {caller.within[0]}"
        self._before = task, place
        held, self._held = self._held, None
        is_quiet = self.fault == (RELAUNCHED, place)
        if (is_quiet or self.fault == (SWAPPED, place)) and dist.get_rank() == 1 and held is None:
            task.driver, task.step = driver, driver.step
            self._held = partial(self._launch, real, driver, task, is_quiet)
            if is_quiet:
                driver.submitted.entries.append(task.name)
        else:
            real(driver, task)
        if held is not None:
            held()
        return task

    @staticmethod
    def _launch(real: Any, driver: Driver, task: Task, is_noted: bool) -> None:
        real(driver, task)
        if is_noted:
            driver.submitted.entries.pop()

    def _complete(self, caller: _Caller, real: Any, driver: Driver, task: Task) -> None:
        self._before = None
        held, self._held = self._held, None
        if held is not None:
            held()
        real(driver, task)


class _Allocations(TorchFunctionMode):
    """What the engine allocates comes from the pool of its stream, [Note: memory of a task]; else
    what other streams freed may still be in use, and what it frees too."""

    _TAKES = ("empty", "zeros", "full")
    _FILLS = ("zeros", "new_zeros", "zeros_like", "full")
    _WRITES = ("zero_", "copy_", "_foreach_zero_", "_foreach_copy_")

    def __init__(self, breaker: Breaker):
        super().__init__()
        self._breaker = breaker

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **named)
        broken, caller = self._breaker.is_broken, _Caller.find(sys._getframe(1))
        place = f"{name}, {caller.text}"
        if name in self._WRITES and _is_engines(caller) and _is_on_device(args[0]):
            if broken(UNWRITTEN, place):
                return args[0]
            return func(*args, **named)
        result = func(*args, **named)
        if not _is_engines(caller) or not _is_on_device(result):
            return result
        if _memory_of(result) in map(_memory_of, (*args, *named.values())):
            return result
        if not caller.tasks and not any(text in name for text in self._TAKES):
            return result
        if name in self._FILLS and broken(UNWRITTEN, place):
            return torch.empty_like(result)
        if broken(FREED, place):
            return _unowned(result)
        return self._breaker.moved(result) if broken(FOREIGN_MEMORY, place) else result


def _is_engines(caller: _Caller) -> bool:
    """Whether it is about the device: not the checks of what the engine is given."""
    functions = [*caller.within, *caller.outside]
    return bool(functions) and not any(
        text.startswith(("sharded_arguments.", "groups.")) for text in functions
    )


def _is_on_device(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and _is_on_device(value[0])
    return isinstance(value, torch.Tensor) and value.is_cuda


def _memory_of(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which is free when `tensor` is: nobody else owns it."""
    whole = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        whole.data_ptr(), tensor.device, whole.nbytes()
    )
    alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alone.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


# ---- on the ranks


class Result(NamedTuple):
    """Of a program with a fault. told: accesses that nothing orders; seen: by the program; places:
    how often each was passed."""

    told: list[str]
    seen: Seen
    places: dict[Fault, int]


class Attempt(NamedTuple):
    """A fault, or none, in a program: its index among PROGRAMS."""

    fault: Fault | None
    program: int


def train_with_each(
    attempts: Sequence[Attempt], delays: Delays, limit_s: float, folder: str
) -> None:
    """One after the other; what came of each is written at once, for the next may end this rank.
    A rank that takes longer than `limit_s` seconds for one ends itself."""
    from scripts.testbed.device import inside

    for number, (fault, program) in enumerate(attempts):
        faulthandler.dump_traceback_later(limit_s, exit=True)
        inside.set_delays(delays, dist.get_rank(), dist.get_world_size())
        seen: list[Seen] = []
        with Breaker(fault) as breaker:
            told = inside.unordered(lambda: seen.append(PROGRAMS[program].train()))  # noqa: B023
        faulthandler.cancel_dump_traceback_later()
        result = Result(told, seen[0], breaker.places)
        _path(folder, number, dist.get_rank()).write_bytes(pickle.dumps(result))


def results_of(num_attempts: int, num_ranks: int, folder: str) -> list[Result]:
    """What all ranks have written: what they were told together, and what rank 0 saw."""
    results: list[Result] = []
    for number in range(num_attempts):
        paths = [_path(folder, number, rank) for rank in range(num_ranks)]
        if not all(path.is_file() for path in paths):
            break
        ranks: list[Result] = [pickle.loads(path.read_bytes()) for path in paths]
        results.append(ranks[0]._replace(told=[line for one in ranks for line in one.told]))
    return results


def _path(folder: str, number: int, rank: int) -> Path:
    return Path(folder) / f"{number}-{rank}"
