# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns memory that is registered with NCCL's communicators, at equal offsets on all ranks."""

import ctypes
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.collectives import AxisGroup
from megatron_asynchzp.engine.device import device_of
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import spans_nodes
from megatron_asynchzp.errors import raise_first

_logger = logging.getLogger("megatron_asynchzp")
_SYMMETRIC, _PROBE_NBYTES = 1, 4096  # NCCL_WIN_COLL_SYMMETRIC; the alignment of windows
_LINES = {
    True: "%s of ranks %d to %d: NCCL gave a window, symmetric kernels can run",
    False: "%s of ranks %d to %d: NCCL gave no window, it copies (NCCL_DEBUG=INFO says why)",
    None: "%s of ranks %d to %d: registered; whether NCCL gave a window is not known",
}


class RegisteredMemory:
    """Allocates regions of an arena, each a window of every communicator within a domain.

    NCCL's symmetric kernels copy nothing and take few of the GPU's cores. They want a buffer at one
    offset of a window on all ranks, as places of an arena have (law 3). A region is the only
    allocation of its pool: torch would register a later segment from within its allocator, at a
    time of each rank's own, but registering is collective and has no time limit.
    """

    def __init__(self, axes: Iterable[AxisGroup], schedule: ScheduleConfig, device: torch.device):
        self._torch_device = device
        self._device: Any = device_of(torch.empty(0, device=device))
        self._is_symmetric = schedule.registers_windows
        self.backends, self._pools = list[Any](), list[Any]()  # empty unless memory is registered
        domain = schedule.registers_memory
        inside = {a.group: a.ranks for a in axes if domain and not spans_nodes(a.ranks, domain)}
        raise_first(_faults(inside, self._device))
        for group, ranks in inside.items():  # in one order on all ranks
            # NCCL makes a communicator in its first collective.
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # pyright: ignore[reportUnknownMemberType]
            backend: Any = group._get_backend(device)  # pyright: ignore[reportPrivateUsage]
            is_given = _gives_window(backend) if self._is_symmetric else None
            if dist.get_rank() == (ranks[0] if is_given is False else 0):
                _logger.info(_LINES[is_given], group.group_desc, ranks[0], ranks[-1])
            if is_given is not False:
                self.backends.append(backend)

    def new(self, nbytes: int) -> torch.Tensor:
        """Allocate a 1-D uint8 tensor. Collective over the groups that register it, if any."""
        if not self.backends:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._torch_device)
        pool, memory = self._device.new_segment(nbytes, self.backends[0].mem_allocator)
        for backend in self.backends:
            backend.register_mem_pool(pool, symm=self._is_symmetric)
        self._pools.append(pool)
        return memory

    def deregister(self, limit_s: float) -> None:
        """Deregister all, once the device is done; TimeoutError if that takes over `limit_s`."""
        # NCCL does not wait for kernels that use the memory.
        if self._pools and not self._device.synchronize(self._device.record_event(), limit_s):
            raise TimeoutError(f"the device was busy for {limit_s:g} s")
        while self._pools:
            pool = self._pools.pop()
            for backend in self.backends:
                backend.deregister_mem_pool(pool)


def _gives_window(backend: Any) -> bool | None:
    """Ask NCCL for a small window, because torch hides its answer; None if it cannot be asked."""
    for name, mode in ((None, ctypes.DEFAULT_MODE), ("libnccl.so.2", os.RTLD_NOLOAD)):
        with suppress(OSError, AttributeError):
            nccl = ctypes.CDLL(name, mode)
            register, comm = nccl.ncclCommWindowRegister, ctypes.c_void_p(backend._comm_ptr())
            break
    else:
        return None
    memory, window, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(_PROBE_NBYTES)
    nccl.ncclMemAlloc(ctypes.byref(memory), size)
    status = register(comm, memory, size, ctypes.byref(window), _SYMMETRIC)
    is_given = bool(window)
    nccl.ncclCommWindowDeregister(comm, window)
    nccl.ncclMemFree(memory)
    return None if status else is_given


def _faults(groups: Iterable[dist.ProcessGroup], device: Any) -> Iterator[str]:
    remedy = "or leave out --use-nccl-ub (registers_memory)"
    names = {dist.get_backend(group) for group in groups}
    if names - {"nccl"}:
        yield f"memory cannot be registered with {min(names)}. Use NCCL on a GPU, {remedy}."
    elif names and (version := device.nccl_version()) < (2, 27):
        shown = ".".join(map(str, version))
        yield f"NCCL {shown} has no windows. Install NCCL 2.27 or later, {remedy}."
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if names and "expandable_segments:True" in (settings := os.environ.get(name, "")):
            yield f"{name}={settings} excludes registered memory. Drop it, {remedy}."
