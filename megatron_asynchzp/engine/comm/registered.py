# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns memory that is registered with NCCL's communicators, at equal offsets on all ranks."""

import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.sharding.topology import spans_nodes
from megatron_asynchzp.errors import raise_first

_logger = logging.getLogger("megatron_asynchzp")
_SYMMETRIC, _PROBE_NBYTES = 1, 4096  # NCCL_WIN_COLL_SYMMETRIC; the alignment of windows
_LINES = {
    True: "%s of ranks %d to %d: NCCL gave a window, symmetric kernels can run",
    False: "%s of ranks %d to %d: NCCL gave no window, it copies (NCCL_DEBUG=INFO says why)",
    None: "%s of ranks %d to %d: registered; whether NCCL gave a window is not known",
}
Allocator = Callable[[int], torch.Tensor]  # returns a 1-D uint8 tensor of so many bytes


class RegisteredMemory:
    """Allocates regions of a rank's arenas, each a window of its communicators within a domain.

    NCCL's symmetric kernels copy nothing and take few of the GPU's cores. They want a buffer at one
    offset of a window on all ranks, as places of an arena have (law 3). A region is the only
    allocation of its pool: torch would register a later segment from within its allocator, at a
    time of each rank's own, but registering is collective and has no time limit.
    """

    def __init__(self, device: Any, domain: int = 0, is_symmetric: bool = True):
        self._device, self._domain, self._is_symmetric = device, domain, is_symmetric
        self._backends: dict[dist.ProcessGroup, Any] = {}  # None: registers nothing
        self._registered: list[tuple[Any, Any]] = []  # backends and pools

    def allocator(self, groups: Iterable[dist.ProcessGroup]) -> Allocator | None:
        """Return what allocates windows of `groups`, if any has some. Collective, as its calls."""
        in_order = dict.fromkeys(groups if self._domain else ())  # the same on all ranks
        for group in in_order:
            if group not in self._backends:
                self._backends[group] = self._connect(group)
        backends = [own for group in in_order if (own := self._backends[group]) is not None]
        return partial(self._new, backends) if backends else None

    def _connect(self, group: dist.ProcessGroup) -> Any:
        """Return the backend of `group`, or None if it registers nothing."""
        ranks = dist.get_process_group_ranks(group)
        if spans_nodes(ranks, self._domain):
            return None
        raise_first(_faults(dist.get_backend(group), self._device))
        device = self._device.torch_device
        # NCCL makes a communicator in its first collective.
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # pyright: ignore[reportUnknownMemberType]
        backend: Any = group._get_backend(device)  # pyright: ignore[reportPrivateUsage]
        is_given = _gives_window(backend) if self._is_symmetric else None
        if dist.get_rank() == (ranks[0] if is_given is False else 0):
            _logger.info(_LINES[is_given], group.group_desc, ranks[0], ranks[-1])
        return None if is_given is False else backend

    def _new(self, backends: list[Any], nbytes: int) -> torch.Tensor:
        pool, memory = self._device.new_segment(nbytes, backends[0].mem_allocator)
        for backend in backends:
            backend.register_mem_pool(pool, symm=self._is_symmetric)
            self._registered.append((backend, pool))
        return memory

    def deregister(self, limit_s: float, *events: Any) -> None:
        """Deregister all after the current stream and `events`, or raise TimeoutError."""
        # NCCL does not wait for kernels that use the memory.
        for event in (self._device.record_event(), *events) if self._registered else ():
            if not self._device.synchronize(event, limit_s):
                raise TimeoutError(f"the device was busy for {limit_s:g} s")
        while self._registered:
            backend, pool = self._registered.pop()
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


def _faults(backend: str, device: Any) -> Iterator[str]:
    remedy = "or leave out --use-nccl-ub (registers_memory)"
    if backend != "nccl":
        yield f"memory cannot be registered with {backend}. Use NCCL on a GPU, {remedy}."
    elif (version := device.nccl_version()) < (2, 27):
        yield f"NCCL {'.'.join(map(str, version))} has no windows. Install 2.27 or later, {remedy}."
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in (settings := os.environ.get(name, "")):
            yield f"{name}={settings} excludes registered memory. Drop it, {remedy}."
