# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""torch.cuda's streams and events without a device: whatever is put into a stream happens at once.
What runs here is the code that uses them, not its timing."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch

from megatron_asynchzp.device import StreamDevice


class InertStream:
    """calls: how often each method was called, on all streams and events."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, device: Any = None, priority: int = 0):
        pass

    def wait_stream(self, other: "InertStream") -> None:
        InertStream.calls["wait_stream"] += 1

    def wait_event(self, event: "InertEvent") -> None:
        InertStream.calls["wait_event"] += 1


class InertEvent:
    def __init__(self, enable_timing: bool = False):
        pass

    def record(self, stream: InertStream | None = None) -> None:
        InertStream.calls["record"] += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "InertEvent") -> float:
        return 0.0


class InertDevice(StreamDevice):
    """The engine's interface to such streams; its tensors are those of the CPU."""

    def __init__(self):
        super().__init__(torch.cuda, torch.device("cuda", 0))

    def new_host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)  # memory cannot be pinned without a device


@contextmanager
def inert_streams() -> Iterator[Counter[str]]:
    """In place of torch.cuda's while this lasts; yields the calls."""
    InertStream.calls = Counter()
    threads, default = threading.local(), InertStream()

    def current_stream(device: Any = None) -> InertStream:
        return getattr(threads, "stream", default)

    @contextmanager
    def on_stream(stream: InertStream) -> Iterator[None]:
        before, threads.stream = current_stream(), stream
        yield
        threads.stream = before

    def sleep(cycles: int) -> None:
        assert cycles > 0
        InertStream.calls["sleep"] += 1

    replaced = {
        "Stream": InertStream,
        "Event": InertEvent,
        "current_stream": current_stream,
        "stream": on_stream,
        "set_device": lambda device: None,
        "_sleep": sleep,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **replaced))
        nothing = mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None)
        stack.enter_context(nothing)
        for module in ("megatron_asynchzp.zero.step", "scripts.gpu_check.poison"):
            stack.enter_context(mock.patch(f"{module}.device_of", lambda tensor: InertDevice()))
        yield InertStream.calls
