# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of the device path, made by rule: what the engine asks of streams, events and memory is
left out or done wrong at one place of the program at a time. For ranks on the emulated device.

A place is what asks (which wait of a task, which function) and who calls that. A run notes all
places, and each is broken in a run of its own; so code that moves needs no new mutant.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_asynchzp import ScheduleConfig, ShardSizes, shard
from megatron_asynchzp.comm.driver import Driver, Task
from megatron_asynchzp.device import StreamDevice
from megatron_asynchzp.sharding.memory_map import MemoryMap
from tests.device.programs import CLIP, Seen, device_of_rank, new_adamw, new_toy, steps_of
from tests.support.toy_models import toy_batch, toy_loss

NO_WAIT = "a stream does not wait"
NO_HOST_WAIT = "the host does not wait"
NO_COLLECTIVE_WAIT = "a handle is dropped"
EARLY = "an event is recorded early"
ELSEWHERE = "an event is recorded on another stream"
NO_LANE = "a task runs on a stream of its own"
FOREIGN_MEMORY = "it takes memory of another stream"
REUSED = "memory is reused without its last users"
UNNOTED = "a user of memory is not noted"
SWAPPED = "rank 1 launches it after the next"


class Fault(NamedTuple):
    """what: one of the above; place: where."""

    what: str
    place: str


# ---- places


class _Caller(NamedTuple):
    """Who asks for something: functions of the engine, innermost first, and the task within."""

    functions: list[str]
    task: Task | None

    @classmethod
    def find(cls, frame: FrameType | None) -> "_Caller":
        functions, task = [], None
        while frame is not None:
            name, code = frame.f_globals.get("__name__", ""), frame.f_code
            if name.startswith("megatron_asynchzp.") and not code.co_name.startswith("<"):
                owner = frame.f_locals.get("self")
                if isinstance(owner, Task) and task is None and code.co_name != "wait":
                    task = owner
                functions.append(f"{name.rpartition('.')[2]}.{code.co_name}")
            frame = frame.f_back
        return cls(functions, task)

    @property
    def text(self) -> str:
        """The two innermost functions that know what they do, and the lane."""
        plain = [name for name in self.functions if not name.startswith(("driver.", "device."))]
        lane = f"{self.task.lane}: " if self.task is not None else ""
        return lane + " in ".join(plain[:2])

    def count(self, what: str) -> int:
        """How often `what` was asked within the task before."""
        if self.task is None:
            return 0
        counts = self.task.__dict__.setdefault("_asked", Counter())
        counts[what] += 1
        return counts[what] - 1


def _wait_place(caller: _Caller) -> str:
    task = caller.task
    if task is None:
        return f"wait, {caller.text}"
    index = caller.count(NO_WAIT)
    if index < len(task.ready):
        return f"ready[{min(index, 2)}], {caller.text}"
    return f"after[{min(index - len(task.ready), 2)}], {caller.text}"


# ---- breaking


class Breaker:
    """Notes every place while a program runs, and breaks one of them: fault, None for none."""

    def __init__(self, fault: Fault | None):
        self.fault = fault
        self.places: dict[Fault, int] = {}
        self._earlier: dict[str, Any] = {}
        self._idle = torch.cuda.Stream()
        self._held: Callable[[], object] | None = None  # launches what waits for the next task

    def is_broken(self, what: str, place: str) -> bool:
        at = Fault(what, place)
        self.places[at] = self.places.get(at, 0) + 1
        return at == self.fault

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of another stream, which may still be in use there."""
        current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
        other = default if current != default else self._idle
        with torch.cuda.stream(other):
            moved = torch.empty_like(tensor)
        return moved.copy_(tensor)

    def __enter__(self) -> "Breaker":
        self._patches = ExitStack()
        for owner, name in (
            (StreamDevice, "wait_event"),
            (StreamDevice, "wait_work"),
            (StreamDevice, "record_event"),
            (StreamDevice, "synchronize"),
            (StreamDevice, "on_stream"),
            (MemoryMap, "hand_over"),
            (MemoryMap, "note_user"),
            (Driver, "submit"),
            (Task, "wait"),
        ):
            replacement = self._method(getattr(owner, name), getattr(self, f"_{name}"))
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

    def _wait_event(self, caller: _Caller, real: Any, device: Any, event: Any) -> None:
        place = _wait_place(caller)
        if event is not None and not self.is_broken(NO_WAIT, place):
            real(device, event)

    def _wait_work(self, caller: _Caller, real: Any, device: Any, work: Any, *rest: Any) -> None:
        place = f"collective {caller.count(NO_COLLECTIVE_WAIT)}, {caller.text}"
        if not self.is_broken(NO_COLLECTIVE_WAIT, place):
            real(device, work, *rest)

    def _record_event(self, caller: _Caller, real: Any, device: Any) -> Any:
        if self.is_broken(EARLY, caller.text):
            with torch.cuda.stream(self._idle):
                idle = real(device)
            event = self._earlier.get(caller.text, idle)
            self._earlier[caller.text] = real(device)
            return event
        if self.is_broken(ELSEWHERE, caller.text):
            current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
            with torch.cuda.stream(default if current != default else self._idle):
                return real(device)
        return real(device)

    def _synchronize(self, caller: _Caller, real: Any, device: Any, *rest: Any) -> bool:
        return self.is_broken(NO_HOST_WAIT, caller.text) or real(device, *rest)

    def _on_stream(self, caller: _Caller, real: Any, device: Any, stream: Any) -> Any:
        task = sys._getframe(2).f_locals.get("task")
        place = f"{task.lane}: {caller.text}" if task is not None else caller.text
        return real(device, device.new_stream() if self.is_broken(NO_LANE, place) else stream)

    def _hand_over(self, caller: _Caller, real: Any, memory: Any, extent: Any) -> Any:
        users = real(memory, extent)
        return [] if users and self.is_broken(REUSED, caller.text) else users

    def _note_user(self, caller: _Caller, real: Any, memory: Any, *rest: Any) -> None:
        if not self.is_broken(UNNOTED, caller.text):
            real(memory, *rest)

    # What was held back is launched behind the next task, or where its result is needed.

    def _submit(self, caller: _Caller, real: Any, driver: Driver, task: Task) -> Task:
        held, self._held = self._held, None
        is_swapped = self.is_broken(SWAPPED, f"{task.lane}: {caller.text}")
        if is_swapped and dist.get_rank() == 1 and held is None:
            task.driver, task.step = driver, driver.step
            self._held = partial(real, driver, task)
        else:
            real(driver, task)
        if held is not None:
            held()
        return task

    def _wait(self, caller: _Caller, real: Any, task: Task) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            held()
        real(task)


class _Allocations(TorchFunctionMode):
    """What the engine allocates comes from the pool of its stream, [Note: memory of a task]; else
    what other streams freed may still be in use, and what it frees too."""

    def __init__(self, breaker: Breaker):
        super().__init__()
        self._breaker = breaker

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        name = getattr(func, "__name__", "")
        if not isinstance(result, torch.Tensor) or not result.is_cuda or name == "__get__":
            return result
        if _memory_of(result) in map(_memory_of, (*args, *named.values())):
            return result
        caller = _Caller.find(sys._getframe(1))
        if not caller.functions or not self._breaker.is_broken(
            FOREIGN_MEMORY, f"{name}, {caller.text}"
        ):
            return result
        return self._breaker.moved(result)


def _memory_of(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


# ---- the program


class Setting(NamedTuple):
    """What the engine is run with."""

    sizes: tuple[int, int, int]
    schedule: ScheduleConfig
    num_micro_batches: int = 2
    recomputes: bool = False


SETTINGS = (
    Setting((1, 2, 2), ScheduleConfig(timed_every=1)),
    Setting((2, 2, 2), ScheduleConfig(prefetch_depth=2), recomputes=True),
    Setting((1, 1, 2), ScheduleConfig(keep_params_nbytes=1 << 14), 3),
    Setting((2, 2, 2), ScheduleConfig(keep_grads_nbytes=1 << 14, grad_slot_nbytes=2048), 3),
)


def train(setting: Setting) -> Seen:
    model = new_toy(setting.recomputes)
    sizes = ShardSizes(*setting.sizes)
    with shard(model, model.blocks, sizes, new_adamw, schedule=setting.schedule) as sharded:

        def end() -> torch.Tensor:
            norm = sharded.clip_grad_norm_(CLIP)
            sharded.step()
            with torch.no_grad():  # an evaluation
                toy_loss(model, toy_batch(0, 0, dist.get_rank()).to(device_of_rank()))
            return norm

        return steps_of(
            model,
            setting.num_micro_batches,
            sharded.zero_grad,
            sharded.set_is_last_micro_batch,
            end,
        )


def _train_all(seen: list[Seen]) -> None:
    for setting in SETTINGS:
        seen.append(train(setting))


class Result(NamedTuple):
    """Of the program with a fault. told: accesses that nothing orders; seen: by all settings;
    places: how often each was passed."""

    told: list[str]
    seen: list[Seen]
    places: dict[Fault, int]


def train_with_each(faults: Sequence[Fault | None], progress: str) -> list[Result]:
    """One fault after the other. progress: a file in which rank 0 counts those that have begun."""
    from scripts.testbed.device import inside

    results = []
    for index, fault in enumerate(faults):
        if dist.get_rank() == 0:
            Path(progress).write_text(str(index))
        seen: list[Seen] = []
        with Breaker(fault) as breaker:
            told = inside.unordered(partial(_train_all, seen))
        results.append(Result(told, seen, breaker.places))
    return results
