# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns stream and event semantics for torch.cpu, where torch has none.

[Note: what waiting means] On an accelerator `work.wait()` makes the current stream wait, not the
host. Here only collectives are asynchronous; tensor operations run on the host at once. So

    default stream (every thread begins on one of its own)    waiting blocks the thread
    side stream (torch.cpu.Stream, entered explicitly)         waiting is noted: what is issued,
                                                              recorded or waited for on that
                                                              stream later comes after it

A tensor operation in place on a side stream with something noted is noted too: a thread of the
stream does it after that. Any other operation there first waits on the host (counted, see
host_waits): slower than an accelerator, never wrong. The current stream belongs to a thread, as on
CUDA; background threads that know no streams simply block.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_REPLACED = ("Stream", "Event", "current_stream", "stream", "synchronize", "StreamContext")


class Waitable(Protocol):
    """A piece of asynchronous work."""

    def is_completed(self) -> bool: ...

    def block(self) -> None:
        """Return when it has finished; raise what it failed with."""


class _Deferred:
    """A tensor operation that a stream will do."""

    def __init__(self, run: Callable[[], Any], after: list[Waitable]):
        self._run, self._after = run, after
        self._finished, self._error = threading.Event(), None

    @torch.no_grad()  # threads do not inherit it
    def do(self) -> None:
        """For the thread of the stream."""
        try:
            for work in self._after:
                work.block()
            self._run()
        except BaseException as error:  # every waiter gets the error
            self._error = error
        del self._run, self._after
        self._finished.set()

    def is_completed(self) -> bool:
        return self._finished.is_set()

    def exception(self) -> BaseException | None:
        return self._error

    def block(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error


class Stream:
    """Side stream; see [Note: what waiting means]. `priority` and `device` change nothing."""

    is_default = False

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self._mutex = threading.Lock()
        self._noted: list[Waitable] = []
        self._deferred: queue.SimpleQueue | None = None

    def pending(self) -> list[Waitable]:
        """What work issued on this stream now has to wait for.

        A failed piece stays: its waiters get the error.
        """
        with self._mutex:
            self._noted = [w for w in self._noted if not (w.is_completed() and not _failed(w))]
            return list(self._noted)

    def wait_for(self, works: list[Waitable]) -> None:
        """Everything issued on this stream from now on comes after `works`."""
        with self._mutex:
            self._noted += [work for work in works if work not in self._noted]

    def defer(self, run: Callable[[], Any]) -> None:
        """Do `run` after everything noted so far, which it joins."""
        if self._deferred is None:
            self._deferred = queue.SimpleQueue()
            threading.Thread(target=_do_all, args=(self._deferred,), daemon=True).start()
        operation = _Deferred(run, self.pending())
        self.wait_for([operation])
        self._deferred.put(operation)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_for(stream.pending())

    def wait_event(self, event: "Event") -> None:
        self.wait_for(event.pending())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block this thread until everything noted has finished."""
        for work in self.pending():
            work.block()
        with self._mutex:
            self._noted = [w for w in self._noted if not w.is_completed()]

    def query(self) -> bool:
        return not self.pending()


class _DefaultStream(Stream):
    is_default = True

    def wait_for(self, works: list[Waitable]) -> None:
        for work in works:
            work.block()


class Event:
    """A point in a stream. `enable_timing` and the like change nothing."""

    def __init__(self, *_: Any, **__: Any):
        self._works: list[Waitable] = []

    def record(self, stream: Stream | None = None) -> None:
        self._works = (stream or current_stream()).pending()

    def pending(self) -> list[Waitable]:
        return list(self._works)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        for work in self._works:
            work.block()

    def query(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _Thread(threading.local):
    """What a thread is on."""

    def __init__(self):
        self.default = _DefaultStream()
        self.current: Stream = self.default
        self.host_waits = 0


_THREAD = _Thread()


def current_stream(device: Any = None) -> Stream:
    """The stream this thread is on."""
    return _THREAD.current


def host_waits() -> int:
    """Return how often a tensor operation on a side stream held this thread up."""
    return _THREAD.host_waits


class _HostGuard(TorchDispatchMode):
    """Lets a tensor operation run only after what its stream waits for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # A view moves no data, nor does an operation that has no tensor to read.
        is_harmless = getattr(func, "is_view", False) or not _has_tensor(args)
        if not is_harmless and (stream := _THREAD.current).pending():
            if _is_in_place(func, args):
                stream.defer(lambda: func(*args, **(kwargs or {})))
                return args[0]
            _THREAD.host_waits += 1
            stream.synchronize()
        return func(*args, **(kwargs or {}))


class StreamContext(AbstractContextManager):
    """The thread is on `stream` inside; None changes nothing."""

    def __init__(self, stream: Stream | None):
        self.stream = stream
        self._guard = _HostGuard()

    def __enter__(self):
        if self.stream is not None:
            self._before, _THREAD.current = _THREAD.current, self.stream
            if not self.stream.is_default:
                self._guard.__enter__()

    def __exit__(self, *error):
        if self.stream is not None:
            if not self.stream.is_default:
                self._guard.__exit__(*error)
            _THREAD.current = self._before


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def synchronize(device: Any = None) -> None:
    """Wait for the current stream: other streams are not known here."""
    _THREAD.current.synchronize()


class InstalledStreams(AbstractContextManager):
    """What torch.cpu had before; `undo`, or the end of a with block, gives it back."""

    def __init__(self, originals: dict[str, Any]):
        self._originals = originals

    def undo(self) -> None:
        """Put torch's own back; a second time does nothing."""
        for name, original in self._originals.items():
            setattr(torch.cpu, name, original)
        self._originals = {}

    def __exit__(self, *error):
        self.undo()


def install_streams() -> InstalledStreams:
    """Give torch.cpu these streams; only side streams change what waiting for a work means."""
    installed = InstalledStreams({name: getattr(torch.cpu, name) for name in _REPLACED})
    for name in _REPLACED:
        setattr(torch.cpu, name, globals()[name])
    return installed


def _do_all(operations: queue.SimpleQueue) -> None:
    while True:
        operations.get().do()


def _is_in_place(func: Any, args: tuple) -> bool:
    """Return whether the operation changes its first argument and returns nothing else.

    Storage is not data: to resize a tensor has an effect on the host at once.
    """
    name = func._schema.name.removeprefix("aten::")
    is_named = name.endswith("_") and not name.startswith(("_", "resize", "set_"))
    return is_named and bool(args) and isinstance(args[0], torch.Tensor)


def _failed(work: Waitable) -> bool:
    return getattr(work, "exception", lambda: None)() is not None


def _has_tensor(args: tuple) -> bool:
    return any(
        isinstance(a, torch.Tensor) or (isinstance(a, list | tuple) and _has_tensor(tuple(a)))
        for a in args
    )
