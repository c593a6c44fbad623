# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the threads that run operations in the order of submission, and their handles."""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from scripts.testbed.fabric.streams import current_stream
from scripts.testbed.fabric.wire import FabricError


class _Thread(threading.local):
    blocked_s = 0.0


_THREAD = _Thread()


def blocked_s() -> float:
    """Seconds for which this thread has waited for operations of the network, ever."""
    return _THREAD.blocked_s


class FabricWork(Work):
    """Handle of one operation. Every waiter gets its error, each as an exception of its own."""

    def __init__(self, name: str, result: list[Any]):
        super().__init__()
        self._name, self._result = name, result
        self._mutex = threading.Lock()
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """For the lane alone."""
        with self._mutex:
            self._error = error
            self._finished.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def block(self, timeout_s: float | None = None) -> None:
        """Block this thread until the operation has finished.

        Without a limit of its own this ends when the lane does: each operation has a limit there.
        """
        begin_s = time.perf_counter()
        is_finished = self._finished.wait(timeout_s)
        _THREAD.blocked_s += time.perf_counter() - begin_s
        if not is_finished:
            raise FabricError(f"{self._name}: not finished within {timeout_s:.3g} s")
        if self._error is not None:
            raise FabricError(f"{self._name}: {self._error}") from self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; see [Note: what waiting means] in streams.py."""
        stream = current_stream()
        if stream.is_default:
            self.block(timeout.total_seconds() if timeout else None)
        else:
            stream.wait_for([self])
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._finished.is_set()

    def is_success(self) -> bool:
        return self._finished.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        self.block()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """Completes on the host, whatever stream is current."""
        with self._mutex:
            if self._future is None:
                self._future = torch.futures.Future()
                is_late = self._finished.is_set()
            else:
                is_late = False
        if is_late:
            self._settle(self._future)
        return self._future

    def _settle(self, future: torch.futures.Future) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(FabricError(f"{self._name}: {self._error}"))


class Lane:
    """One thread: a stream of communication. Starts with its first operation.

    on_failure: called once per failed operation, before its waiters hear of it.
    """

    def __init__(self, name: str, on_failure: Callable[[BaseException], None]):
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._mutex = threading.Lock()
        self._is_closed = False

    def submit(self, work: FabricWork, run: Callable[[], Any]) -> FabricWork:
        """Run after all that was submitted before, and what the current stream waits for."""
        before = current_stream().pending()
        with self._mutex:
            if self._is_closed:
                raise FabricError("the process group has been shut down")
            if not self._thread.is_alive():
                self._thread.start()
            self._queue.put((work, before, run))
        return work

    @torch.no_grad()  # threads do not inherit it
    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            work, before, run = item
            try:
                for earlier in before:
                    earlier.block()
                run()
            except BaseException as error:  # every waiter gets the error
                self._on_failure(error)
                work.finish(error)
            else:
                work.finish()
            del item, work, before, run  # tensors must not live until the next operation

    def close(self) -> None:
        """Accept nothing more; what was submitted still runs."""
        with self._mutex:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came in time."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
