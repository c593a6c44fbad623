# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""That the emulated device itself is right: torch's own data parallelism on it, bit for bit, and
one line for what it cannot do."""

import ctypes

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from scripts.testbed.ranks import run_ranks
from tests.device.programs import device_of_rank, train_torch_under


@pytest.mark.slow  # fast for the engine in test_engine.py, and for both on the fabric
def test_fsdp2_and_ddp_have_their_bits_of_gloo_under_every_law_of_delay(worlds: DeviceWorlds):
    laws = [Delays(law, seed) for seed, law in enumerate(LAWS)]
    [expected] = run_ranks(train_torch_under, 2, [])[0]
    late = {"ASYNCHZP_DEVICE_FREES": "late"}  # FSDP2 orders a stream when it reuses what it freed
    ranks = worlds.run(train_torch_under, 2, laws, env=late)
    for delays, seen in zip(laws, ranks[0], strict=True):
        assert seen == expected, str(delays)


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


def mix_devices() -> None:
    torch.ones(3, device=device_of_rank()).add(torch.ones(3))


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


def test_tensors_on_two_devices_are_refused_as_on_cuda(worlds: DeviceWorlds):
    with pytest.raises(DeviceFailure, match="all tensors to be on the same device"):
        worlds.run(mix_devices, 1, timeout_s=60)
