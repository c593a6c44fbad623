# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Says what torch finds on the emulated device."""

from scripts.testbed.device import build
from scripts.testbed.device.delays import Delays
from scripts.testbed.device.npu import build as npu_build

PLATFORMS = {"cuda": build, "npu": npu_build}
"""Torch's own CUDA, or torch_npu over ACL and HCCL; each builds the layers below it."""


def environment(
    num_devices: int = 1, delays: Delays = Delays(), platform: str = "cuda"
) -> dict[str, str]:
    """Variables of a process on the emulated devices; what it starts is on them too.

    platform: of PLATFORMS. Raises CompileError.
    """
    return PLATFORMS[platform].environment() | {
        "ASYNCHZP_DEVICE_PLATFORM": platform,
        "ASYNCHZP_DEVICES": str(num_devices),
        "ASYNCHZP_DEVICE_DELAYS": f"{delays.law} {delays.seed} {delays.longest_us}",
        # Kernels that are compiled for a device cannot run here; Triton's are interpreted.
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
        # The NCCL groups that torch 2.15 makes by default let a stream go on without an event where
        # their watchdog, a thread, has seen the collective end: an order that is not on a stream,
        # which the watch over races would have to learn from threads.
        "TORCH_DIST_USE_NCCL2": "0",
    }
