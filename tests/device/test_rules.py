# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of CUDA that tests on the emulated device rely on; the sources cite them."""

import ctypes
import warnings

import torch

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceWorlds
from tests.device.programs import device_of_rank


def copies() -> list[float]:
    """All kernels are late: what is seen before and after the host waits."""
    seen, device = [], device_of_rank()
    pinned = torch.ones(8).pin_memory()
    from_pinned = pinned.to(device, non_blocking=True)
    pinned.fill_(2)  # read when the stream gets there
    pageable = torch.ones(8)
    from_pageable = pageable.to(device, non_blocking=True)
    pageable.fill_(2)  # staged before the call returned
    back = torch.zeros(8, pin_memory=True)
    back.copy_(from_pinned, non_blocking=True)
    seen.append(back[0].item())  # not there yet
    torch.cuda.synchronize()
    seen += [back[0].item(), from_pageable[0].item()]
    seen.append(from_pinned.cpu()[0].item())  # waits by itself
    from_pinned.fill_(3)  # late
    # The calls themselves: torch's copies of tensors never ask for these, and wait of their own.
    direct, target = torch.zeros(8, pin_memory=True), torch.zeros(8, device=device)
    copy_directly(target, pageable)
    pageable.fill_(4)  # staged before the call returned
    copy_directly(direct, from_pinned)
    seen.append(direct[0].item())  # not there yet
    copy_directly(pageable, target)
    seen += [pageable[0].item(), direct[0].item()]  # complete when it has returned
    copy_directly(target, pinned)
    pinned.fill_(5)  # read when the stream gets there
    copy_directly(pageable, target)
    seen.append(pageable[0].item())
    return seen


def copy_directly(to: torch.Tensor, source: torch.Tensor) -> None:
    words = to.data_ptr(), source.data_ptr(), to.nbytes, 4, torch.cuda.current_stream().cuda_stream
    assert ctypes.CDLL(None).cudaMemcpyAsync(*map(ctypes.c_void_p, words)) == 0


def test_copies_read_and_write_page_locked_memory_late_and_pageable_memory_at_the_call(
    worlds: DeviceWorlds,
):
    for delays in (Delays("slow-rank", longest_us=20_000), Delays("on-demand")):
        # The host reads and writes too early, to see when kernels do.
        assert worlds.run(copies, 1, delays=delays, watches=False) == [[0, 2, 1, 2, 0, 2, 3, 5]]


def events() -> list[bool]:
    device, side = device_of_rank(), torch.cuda.Stream()
    never, first, later = (torch.cuda.Event() for _ in range(3))
    value = torch.zeros(8, device=device)
    first.record()
    seen = [never.query(), first.query()]
    with torch.cuda.stream(side):
        side.wait_event(first)
        first.record()  # who waits already keeps the record of before
        value.add_(1)
        later.record()
    later.synchronize()
    seen += [first.query(), later.query(), value[0].item() == 1]
    return seen


def test_an_event_is_what_its_stream_had_when_it_was_recorded(worlds: DeviceWorlds):
    for delays in (Delays("slow-rank", longest_us=20_000), Delays("on-demand")):
        assert worlds.run(events, 1, delays=delays) == [[True, False, True, True, True]]


def implicit_waits() -> list[int]:
    """Of each operation: how often torch says that it waits."""
    value = torch.arange(5.0, device=device_of_rank())
    operations = {
        "item": lambda: value.sum().item(),
        "to pageable memory": lambda: value.cpu(),
        "a shape from values": lambda: value.nonzero(),
        "a value for the host": lambda: torch.equal(value, value),
        "to page-locked memory": lambda: torch.empty(5, pin_memory=True).copy_(value, True),
        "arithmetic": lambda: value + 1,
        "random numbers": lambda: torch.rand_like(value),
    }
    torch.cuda.set_sync_debug_mode("warn")
    counts = []
    for run in operations.values():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        counts.append(sum("called a synchronizing" in str(one.message) for one in caught))
    return counts


def test_torch_says_which_operations_make_the_host_wait(worlds: DeviceWorlds):
    """torch.cuda.set_sync_debug_mode; on CUDA the same operations wait."""
    assert worlds.run(implicit_waits, 1) == [[1, 1, 1, 1, 0, 0, 0]]
