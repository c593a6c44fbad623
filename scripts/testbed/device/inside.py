# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Controls the emulated device from inside a process: sets delays, and says what has run."""

import ctypes
import os
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import torch

from scripts.testbed.device.delays import LAWS, Delays, Ran
from scripts.testbed.device.platforms import PLATFORMS
from scripts.testbed.profile import NetworkProfile

_runtime = ctypes.CDLL(None)  # preloaded
if not hasattr(_runtime, "asynchzp_device_set_delays"):
    raise RuntimeError("the emulated device is not preloaded: see scripts.testbed.device.worlds")
_platform = os.environ.get("ASYNCHZP_DEVICE_PLATFORM", "cuda")
IS_NPU = _platform == "npu"
BACKEND = "hccl" if IS_NPU else "nccl"
if not IS_NPU:
    _runtime.cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))  # installs the operations
_operations = ctypes.CDLL(str(PLATFORMS[_platform].built_libraries().operations))
_module: Any = torch.npu if IS_NPU else torch.cuda  # pyright: ignore[reportAttributeAccessIssue]
_runtime.asynchzp_device_num_kernels.restype = ctypes.c_int64
_runtime.asynchzp_device_digest.restype = ctypes.c_uint64
_runtime.asynchzp_device_set_delays.argtypes = [
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
]
_runtime.asynchzp_device_state_time.argtypes = [
    *[ctypes.c_double] * 4,
    ctypes.c_int,
    ctypes.c_double,
]
_runtime.asynchzp_device_compute.argtypes = [ctypes.c_void_p, ctypes.c_double]
_runtime.asynchzp_device_spans.restype = ctypes.c_char_p
_runtime.asynchzp_device_noted.restype = ctypes.c_char_p
_runtime.asynchzp_device_collectives.restype = ctypes.c_char_p
_operations.asynchzp_device_waited.restype = ctypes.c_char_p


class Span(NamedTuple):
    """A span of the device's clock.

    `what`: "compute" or NCCL's kind of call; `begin_s`, `end_s`: by the device's clock. A
    collective begins when its last rank has come, messages on this rank.
    """

    what: str
    begin_s: float
    end_s: float


_OFF, _ENDS, _NOTES = range(3)  # what the watch does


def start(local_rank: int, num_devices: int, watches: bool = True) -> torch.device:
    """Take one of the devices.

    watches: whether accesses that nothing orders end the process. With ASYNCHZP_DEVICE_TRACEBACKS
    it says where both come from.
    """
    os.environ["ASYNCHZP_DEVICES"] = str(num_devices)
    device = torch.device("npu" if IS_NPU else "cuda", local_rank)
    _module.set_device(device)
    _module.init()
    if not IS_NPU:  # torch_npu is not for forks: it has installed its operations just now
        _operations.asynchzp_device_trace()
    _runtime.asynchzp_device_watch(_ENDS if watches else _OFF)
    return device


def set_delays(delays: Delays, rank: int, world_size: int) -> None:
    """For all kernels that follow, when all that are submitted have run."""
    _module.synchronize()  # torch_npu's queue may hold some back
    law = LAWS.index(delays.law)
    _runtime.asynchzp_device_set_delays(law, delays.seed, rank, world_size, delays.longest_us)


def state_time(network: NetworkProfile = NetworkProfile(), host_gbit: float = inf) -> None:
    """Start the device's own clock, which events with timing read.

    `compute` takes what it states, collectives what rings over `network` take, copies between the
    device and its host what a link of `host_gbit` Gbit/s each way takes, everything else nothing.
    No core works or sleeps for it, and it is the same in every run.
    """
    _runtime.asynchzp_device_state_time(
        *(1e9 / 8 * network.gbit(is_inter) for is_inter in (True, False)),
        *(network.latency_s(is_inter) for is_inter in (True, False)),
        network.ranks_per_node,
        1e9 / 8 * host_gbit,
    )


def compute(seconds: float) -> None:
    """Launch a kernel that takes `seconds` by the device's clock, alone on the device."""
    _runtime.asynchzp_device_compute(torch.cuda.current_stream().cuda_stream, seconds)


def spans() -> list[Span]:
    """What has taken a stated time since the last call."""
    _module.synchronize()
    lines = _runtime.asynchzp_device_spans().decode().splitlines()
    return [Span(what, float(begin), float(end)) for what, begin, end in map(str.split, lines)]


def ran() -> Ran:
    _module.synchronize()
    return Ran(_runtime.asynchzp_device_num_kernels(), _runtime.asynchzp_device_digest())


def unordered(run: Callable[[], object]) -> list[str]:
    """Return the accesses of `run` that nothing orders: the lines that else end the process."""
    _runtime.asynchzp_device_watch(_NOTES)
    try:
        run()
        _module.synchronize()
    finally:
        _runtime.asynchzp_device_watch(_ENDS)
    return _runtime.asynchzp_device_noted().decode().splitlines()


def waited() -> dict[str, int]:
    """Operations that waited for their stream, which CUDA's may not do, and how often."""
    lines = _operations.asynchzp_device_waited().decode().splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines)}


def in_windows() -> dict[str, int]:
    """Collectives of communicators with windows, since the last call, and how often.

    The name says the kind, the dtype, and whether the input and the output were in a window.
    """
    lines = _runtime.asynchzp_device_collectives().decode().splitlines()
    return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in lines)}


def num_registered(is_plain: bool = False) -> int:
    """Return how many windows this process's communicators have, or plain registrations."""
    return _runtime.asynchzp_device_num_registered(int(is_plain))
