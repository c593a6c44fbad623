# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""That the emulated device itself is right: torch's own data parallelism on it, bit for bit, and
one line for what it cannot do."""

import ctypes

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from tests.device.programs import device_of_rank


def read_freed_memory() -> tuple[bool, bool]:
    """Of a block that another stream still reads: with record_stream, and without."""
    device, side = device_of_rank(), torch.cuda.Stream()

    def sum_on_side(is_recorded: bool) -> bool:
        block = torch.ones(1000, device=device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = block.clone().sum()
        if is_recorded:
            block.record_stream(side)
        del block
        torch.cuda.synchronize()
        return total.item() == 1000

    return sum_on_side(True), sum_on_side(False)


def test_freed_memory_is_poison_unless_record_stream_holds_it(worlds: DeviceWorlds):
    delays = Delays("slow-stream", seed=1, longest_us=20_000)  # stream 1 is the side stream
    assert worlds.run(read_freed_memory, 1, delays=delays, watches=False) == [(True, False)]


def launch_what_nothing_stands_for() -> None:
    x = torch.ones(2, 3, device=device_of_rank())
    weights = torch.ones(12, 3, device=x.device)
    torch.lstm_cell(x, (x, x), weights, weights)


def make_a_blocking_stream() -> None:
    runtime = ctypes.CDLL(None)
    runtime.cudaStreamCreateWithFlags(ctypes.byref(ctypes.c_void_p()), 0)


def differ() -> None:
    dist.all_reduce(torch.ones(3 + dist.get_rank(), device=device_of_rank()))
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("fn", "world_size", "line"),
    [
        (launch_what_nothing_stands_for, 1, r"no operation stands for the kernel .*lstm_cell"),
        (make_a_blocking_stream, 1, r"a blocking stream is not emulated"),
        (differ, 2, r"ranks differ in a collective: .* all-reduce of 3 float32, .* of 4 float32"),
    ],
)
def test_what_is_not_emulated_ends_in_one_line(worlds: DeviceWorlds, fn, world_size, line):
    with pytest.raises(DeviceFailure, match=rf"emulated device: {line}"):
        worlds.run(fn, world_size, timeout_s=60)
