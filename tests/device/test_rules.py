# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of CUDA that tests on the emulated device rely on; the sources cite them."""

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
    return seen


def test_copies_read_and_write_page_locked_memory_late_and_pageable_memory_at_the_call(
    worlds: DeviceWorlds,
):
    for delays in (Delays("slow-rank", longest_us=20_000), Delays("on-demand")):
        # The host reads and writes too early, to see when kernels do.
        assert worlds.run(copies, 1, delays=delays, watches=False) == [[0, 2, 1, 2]]


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


def random_numbers() -> bool:
    device = device_of_rank()
    torch.manual_seed(3)
    on_device = torch.rand(5, device=device).cpu()
    torch.manual_seed(3)
    return torch.equal(on_device, torch.rand(5))


def test_random_numbers_are_those_of_the_cpu_in_the_order_of_the_host(worlds: DeviceWorlds):
    assert worlds.run(random_numbers, 1, delays=Delays("uniform")) == [True]
