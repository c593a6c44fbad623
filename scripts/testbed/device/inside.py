# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The emulated device from inside a process that runs on it: sets delays, and says what has run.
Importing it installs the operations, so that ranks forked from here need not."""

import ctypes
import os

import torch

from scripts.testbed.device.build import built_libraries
from scripts.testbed.device.delays import LAWS, Delays, Ran

_runtime = ctypes.CDLL(None)  # preloaded
if not hasattr(_runtime, "asynchzp_device_set_delays"):
    raise RuntimeError("the emulated device is not preloaded: see scripts.testbed.device.worlds")
_runtime.cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))  # installs the operations
_operations = ctypes.CDLL(str(built_libraries().operations))
_runtime.asynchzp_device_num_kernels.restype = ctypes.c_int64
_runtime.asynchzp_device_digest.restype = ctypes.c_uint64
_runtime.asynchzp_device_set_delays.argtypes = [
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
]
_operations.asynchzp_device_waited.restype = ctypes.c_char_p


def start(local_rank: int, num_devices: int) -> torch.device:
    """Take one of the devices."""
    os.environ["ASYNCHZP_DEVICES"] = str(num_devices)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.cuda.init()
    return device


def set_delays(delays: Delays, rank: int, world_size: int) -> None:
    """For all kernels that follow, when all that are submitted have run."""
    law = LAWS.index(delays.law)
    _runtime.asynchzp_device_set_delays(law, delays.seed, rank, world_size, delays.longest_us)


def ran() -> Ran:
    torch.cuda.synchronize()
    return Ran(_runtime.asynchzp_device_num_kernels(), _runtime.asynchzp_device_digest())


def waited() -> dict[str, int]:
    """Operations that waited for their stream, which CUDA's may not do, and how often."""
    lines = _operations.asynchzp_device_waited().decode().splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines)}
