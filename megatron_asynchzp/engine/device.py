# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the one interface to cuda, npu and cpu: streams, events and clock.

On a CPU every operation has finished when the call returns, so its streams and events are inert
and what remains to be waited for is a collective.
"""

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

STAYS_FREE = 0.1
"""The part of a device's memory that no budget takes: for fragments, and for what needs more than
the steps so far."""


class CpuDevice:
    """Operations are complete when they return; only collectives overlap with the host."""

    torch_device = torch.device("cpu")
    runs_ahead = False
    """Whether waiting for a collective only orders streams, so that it may be done early."""
    # No wait is longer than this: between two of them Python sees signals and `is_over`.
    _SLICE_S = 0.2

    def new_stream(self) -> None:
        return

    def on_stream(self, stream: None) -> AbstractContextManager[Any]:
        return nullcontext()

    def on_default_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record_event(self) -> None:
        return

    def wait_event(self, event: None) -> None:
        """Make the current stream wait for `event`."""

    def wait_work(
        self, work: dist.Work, limit_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for a collective: on the host here, on the current stream of a device with streams.

        Raises:
            TimeoutError: it took longer than `limit_s` seconds, or `is_over` returned True.
        """
        deadline = time.monotonic() + limit_s
        while not self._wait_slice(work):
            if time.monotonic() > deadline or is_over():
                raise TimeoutError(f"not finished after {limit_s:g} s")

    def _wait_slice(self, work: dist.Work) -> bool:
        """Return whether `work` has completed; raise its error.

        [Note: handles of gloo] After the time limit gloo raises as if `work` had failed, but the
        caller can wait for it again. The handle of a reduce-scatter knows neither a time limit nor
        whether it has completed: it ends with its group's timeout.
        """
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._SLICE_S))
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises, unless it has completed just now
            elif time.monotonic() - start < 0.9 * self._SLICE_S:
                raise
            else:
                return False
        return True

    def is_capturing(self) -> bool:
        """Return whether operations are captured into a graph instead of run."""
        return False

    def has_passed(self, event: object) -> bool:
        return True

    def synchronize(
        self, event: None, limit_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Hold the host until `event`; False after `limit_s` seconds or once `is_over` is True."""
        return True

    def new_host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that the device copies to without holding the host."""
        return torch.empty(shape, dtype=dtype)

    def release_cached(self) -> None:
        """Give memory that no tensor has to other users of the device."""

    def left_nbytes(self) -> None:
        """Return the bytes that a rank may still allocate, less a margin; None if unknown."""
        return

    def bind_thread(self) -> None:
        """Make a new thread use this device."""

    def mark(self) -> float:
        """Mark a point in time on the current stream; see `seconds_between`."""
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


class StreamDevice:
    """cuda and npu, whose torch modules have the same names. CpuDevice documents the methods."""

    runs_ahead = True
    _POLL_S = 0.001

    def __init__(self, module: ModuleType, device: torch.device):
        self._module = module
        self.torch_device = device

    def new_stream(self) -> Any:
        # High: a collective that waits for the device would hold up the peers that wait for it.
        # Of no effect on an NPU: torch_npu makes every stream with priority 0.
        return self._module.Stream(device=self.torch_device, priority=-1)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._module.stream(stream)

    def on_default_stream(self) -> AbstractContextManager[Any]:
        return self._module.stream(self._module.default_stream(self.torch_device))

    def record_event(self) -> Any:
        event = self._module.Event()
        event.record()  # on the current stream
        return event

    def wait_event(self, event: Any) -> None:
        # Not `query` first: it holds the interpreter, and a wait for what has happened is free.
        if event is not None:
            self._module.current_stream(self.torch_device).wait_event(event)

    def wait_work(
        self, work: dist.Work, limit_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        work.wait()  # with a time limit NCCL would block the host

    def is_capturing(self) -> bool:
        # Not every torch_npu has it.
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return ask is not None and ask()

    def has_passed(self, event: Any) -> bool:
        return event is not None and event.query()

    def synchronize(
        self, event: Any, limit_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        deadline = time.monotonic() + limit_s
        while not event.query():
            if time.monotonic() > deadline or is_over():
                return False
            time.sleep(self._POLL_S)
        return True

    def new_host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def new_segment(self, nbytes: int, allocator: Any) -> tuple[Any, torch.Tensor]:
        """Allocate 1-D uint8 memory of `allocator` in a pool of its own, and return both."""
        pool = self._module.MemPool(allocator)
        with self._module.use_mem_pool(pool):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        if (num_segments := len(pool.snapshot())) != 1:
            raise RuntimeError(f"a pool with one allocation has {num_segments} segments")
        return pool, memory

    def nccl_version(self) -> tuple[int, ...]:
        return self._module.nccl.version()

    def release_cached(self) -> None:
        self._module.empty_cache()

    def left_nbytes(self) -> int:
        # What torch's allocator has reserved is not free: it is what the steps so far needed.
        free, total = self._module.mem_get_info(self.torch_device)
        return max(0, free - int(STAYS_FREE * total))

    def bind_thread(self) -> None:
        self._module.set_device(self.torch_device)

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        end.synchronize()  # no wait for what has passed
        return start.elapsed_time(end) / 1e3


Device = CpuDevice | StreamDevice


def device_of(tensor: torch.Tensor) -> Device:
    if tensor.device.type == "cpu":
        return CpuDevice()
    return StreamDevice(getattr(torch, tensor.device.type), tensor.device)


# Of glibc alone.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


def return_freed_memory(device: torch.device) -> None:
    """Give memory of the host that no tensor uses back to the system.

    malloc keeps the gaps between blocks in use, and takes more for a block that fits into no gap.
    Memory of other devices stays with torch's allocator, which has it for the next tensors.
    """
    if device.type == "cpu" and _malloc_trim is not None:
        _malloc_trim(0)
