# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""torch.cuda's streams and events without a device: whatever is put into a stream happens at once.
What runs here is the code that uses them, not its timing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from unittest import mock

import torch


class InertStream:
    """calls: how often each method was called, on all streams."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, device=None, priority: int = 0):
        pass

    def wait_stream(self, other: "InertStream") -> None:
        InertStream.calls["wait_stream"] += 1

    def wait_event(self, event: "InertEvent") -> None:
        InertStream.calls["wait_event"] += 1


class InertEvent:
    def record(self, stream: InertStream | None = None) -> None:
        InertStream.calls["record"] += 1

    def query(self) -> bool:
        return True


@contextmanager
def inert_streams() -> Iterator[Counter[str]]:
    """In place of torch.cuda's while this lasts; yields the calls."""
    InertStream.calls = Counter()
    current = [InertStream()]

    @contextmanager
    def on_stream(stream: InertStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def sleep(cycles: int) -> None:
        assert cycles > 0
        InertStream.calls["sleep"] += 1

    replaced = {
        "Stream": InertStream,
        "Event": InertEvent,
        "current_stream": lambda device=None: current[-1],
        "stream": on_stream,
        "_sleep": sleep,
    }
    with (
        mock.patch.multiple(torch.cuda, **replaced),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield InertStream.calls
