# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The answers of `torch.cuda` on a machine without a device.

It has one device without memory, the CPU's generator, and streams that order nothing, as the CPU
runs every operation in program order.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

# Megatron demands CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism and forbids it for FSDP
# below architecture 10. The variable means nothing here, so claim an architecture that ignores it.
_CAPABILITY = (10, 0)
_NOMINAL_NBYTES = 1 << 40  # "total memory": only ever a divisor


class _Inert:
    def query(self) -> bool:
        return True

    def _nothing(self, *_: Any, **__: Any):
        return None


class InertStream(_Inert):
    """A stream without a queue: each operation before it has finished."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.device = torch.device("cpu")
        self.device_index = 0
        self.device_type = 0
        self.stream_id = self.cuda_stream = 0
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def record_event(self, event: "InertEvent | None" = None) -> "InertEvent":
        event = event or InertEvent()
        event.record(self)
        return event

    synchronize = wait_event = wait_stream = __exit__ = _Inert._nothing

    def __enter__(self):
        return self


class InertEvent(_Inert):
    """An event that is complete when it is made, with the host's times."""

    def __init__(self, *_: Any, **__: Any):
        self._recorded_s = time.perf_counter()

    def record(self, stream: Any = None):
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: "InertEvent") -> float:
        return 1e3 * (end_event._recorded_s - self._recorded_s)

    wait = synchronize = _Inert._nothing


class _InertContext(contextlib.nullcontext):
    def __init__(self, *_: Any, **__: Any):
        super().__init__()


class _InertRuntime:
    cudaError = SimpleNamespace(success=0)

    def __getattr__(self, name: str):
        return _answer(0)


_STREAM = InertStream()


def _answer(value: Any) -> Callable[..., Any]:
    """Make a new function that returns `value`: Replacements knows a stand-in by its identity."""
    return lambda *_, **__: value


def _device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="cpu",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_NOMINAL_NBYTES,
        multi_processor_count=1,
        warp_size=32,
        uuid="cpu",
        gcnArchName="",
    )


# fmt: off
_ANSWERED_BY_NONE = (
    "set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect", "init", "_lazy_init",
    "check_error", "reset_peak_memory_stats", "reset_accumulated_memory_stats",
)
_ANSWERED_BY_ZERO = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "device_memory_used", "utilization", "temperature", "power_draw", "clock_rate",
)
# fmt: on


def cuda_attributes() -> dict[str, Any]:
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "cpu",
        "get_device_capability": _CAPABILITY,
        "current_stream": _STREAM,
        "default_stream": _STREAM,
        "cudart": _InertRuntime(),
        "mem_get_info": (_NOMINAL_NBYTES, _NOMINAL_NBYTES),
    }
    answers |= dict.fromkeys(_ANSWERED_BY_NONE) | dict.fromkeys(_ANSWERED_BY_ZERO, 0)
    attributes = {name: _answer(value) for name, value in answers.items()}
    return (
        attributes
        | rng_attributes()
        | {
            "get_device_properties": _device_properties,
            "Stream": InertStream,
            "Event": InertEvent,
            "stream": lambda stream=None: _InertContext(),
            "device": _InertContext,
            "device_of": type("_InertDeviceOf", (_InertContext,), {}),
            "default_generators": (torch.default_generator,),
            "_lazy_call": lambda callback, **_: callback(),
            "memory_stats": lambda device=None: defaultdict(int),
            "memory_snapshot": lambda *_, **__: [],
        }
    )


def rng_attributes() -> dict[str, Any]:
    generator = torch.default_generator
    return {
        "get_rng_state": lambda device=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda new_state, device=None: generator.set_state(new_state),
        "set_rng_state_all": lambda new_states: generator.set_state(new_states[-1]),
        # Not torch.manual_seed: it calls torch.cuda.manual_seed_all, which leads back here. Seeding
        # the CPU's generator (instead of ignoring the call) keeps the seeds of Megatron's RNG
        # tracker, which differ over tensor parallel ranks, apart.
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "initial_seed": generator.initial_seed,
    }


def nvtx_attributes() -> dict[str, Any]:
    numbers = ("range_push", "range_pop", "range_start")
    answers = dict.fromkeys(numbers, 0) | dict.fromkeys(("range_end", "mark"))
    attributes = {name: _answer(value) for name, value in answers.items()}
    return attributes | {"range": type("_InertRange", (_InertContext,), {})}
