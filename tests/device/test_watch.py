# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The emulated device ends a run for two accesses to the same bytes that nothing orders, without a
delay that would show them; and for nothing that is in order. Each program is a rule of CUDA, NCCL
or torch, named where it is."""

import ctypes
import re
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from tests.device.programs import device_of_rank

Program = Callable[[bool], object]
"""Does it in order, or leaves out what orders it."""


def new(numel: int = 1000) -> torch.Tensor:
    return torch.ones(numel, device=device_of_rank())


def on_side(does: Callable[[], object], *waits_for: torch.cuda.Event) -> torch.cuda.Event:
    """Run on another stream, after events; returns the one of its end."""
    side = torch.cuda.Stream()
    for event in waits_for:
        side.wait_event(event)
    with torch.cuda.stream(side):
        does()
        return now()


def now() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def read_what_another_stream_writes(is_ordered: bool) -> None:
    value = new()
    ready = now()
    value.add_(1)
    # cudaEventRecord: "Captures in event the contents of stream at the time of this call."
    on_side(value.clone, now() if is_ordered else ready).synchronize()


def write_what_another_stream_reads(is_ordered: bool) -> None:
    value = new()
    end = on_side(value.clone, now())
    if is_ordered:
        # cudaStreamWaitEvent: "Makes all future work submitted to stream wait for all work captured
        # in event."
        torch.cuda.current_stream().wait_event(end)
    value.add_(1)
    end.synchronize()


def wait_for_another_event(is_ordered: bool) -> None:
    value = new()
    with torch.cuda.stream(torch.cuda.Stream()):
        other = now()
    # Through a chain of streams: what one waits for is in what it records.
    chained = on_side(lambda: None, now() if is_ordered else other)
    on_side(value.clone, chained).synchronize()


def wait_on_the_host(is_ordered: bool) -> None:
    value = new()
    end = on_side(value.clone, now())
    if is_ordered:
        end.synchronize()  # cudaEventSynchronize: "Waits for an event to complete"
    value.add_(1)
    torch.cuda.synchronize()


def ask_until_it_has_happened(is_ordered: bool) -> None:
    value = new()
    end = on_side(value.clone, now())

    def poll() -> None:
        # cudaEventQuery: cudaSuccess "if all captured work has been completed".
        while not end.query():
            pass

    # Only who asks has seen it. A thread that submits nothing, as a watchdog, has no part in the
    # program: that it saw the end in time is chance.
    watchdog = threading.Thread(target=poll)
    watchdog.start()
    watchdog.join()
    if is_ordered:
        poll()
    value.add_(1)


def free_what_another_stream_reads(is_ordered: bool) -> None:
    """Tensor.record_stream: "if a tensor is used on a stream different from the stream of origin,
    the allocator might reuse the memory unexpectedly"."""
    value, side = new(), torch.cuda.Stream()
    side.wait_event(now())
    with torch.cuda.stream(side):
        value.clone()
    if is_ordered:
        value.record_stream(side)
    del value
    new()  # the next owner
    torch.cuda.synchronize()
    new()


def use_another_streams_new_memory(is_ordered: bool) -> None:
    """CUDA semantics, "Use of a stream for memory": a block comes from what its stream has freed,
    whose last kernels may still be under way there."""
    value = torch.empty(1000, device=device_of_rank())
    on_side(value.zero_, *([now()] if is_ordered else [])).synchronize()


def use_freed_memory(is_ordered: bool) -> None:
    value = new()
    address, nbytes = value.data_ptr(), value.nbytes
    if not is_ordered:
        del value
    stream = torch.cuda.current_stream().cuda_stream
    memset = ctypes.CDLL(None).cudaMemsetAsync
    memset(ctypes.c_void_p(address), 0, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))


def read_the_result_of_a_collective(is_ordered: bool) -> None:
    """torch.distributed, "Synchronous and asynchronous collective operations": on a CUDA stream the
    output is safe to use once wait() has returned."""
    value = new()
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    if is_ordered:
        work.wait()
    value.clone()
    work.wait()


def write_the_input_of_a_collective(is_ordered: bool) -> None:
    value, out = new(), new(1000 * dist.get_world_size())
    work = dist.all_gather_into_tensor(out, value, async_op=True)
    assert work is not None
    if is_ordered:
        work.wait()
    value.add_(1)
    work.wait()


def read_page_locked_memory(is_ordered: bool) -> None:
    """API synchronization behavior: a copy to page-locked memory may return before it is done."""
    value, host = new(), torch.zeros(1000, pin_memory=True)
    host.copy_(value, non_blocking=True)
    if is_ordered:
        torch.cuda.current_stream().synchronize()
    host.sum()


def write_page_locked_memory(is_ordered: bool) -> None:
    value, host = new(), torch.zeros(1000, pin_memory=True)
    value.copy_(host, non_blocking=True)
    host.sum()  # reading it is in order
    if is_ordered:
        now().synchronize()
    host.fill_(1)


PROGRAMS: list[tuple[Program, str]] = [
    (read_what_another_stream_writes, r"copy_ .*reads 4000 bytes .*add_\S* .*default\) writes,"),
    (write_what_another_stream_reads, r"add_\S* .*default\) writes 4000 bytes .*copy_ .*reads,"),
    (wait_for_another_event, r"copy_ .*reads 4000 bytes .*fill_\S* .*default\) writes,"),
    (wait_on_the_host, r"add_\S* .*default\) writes 4000 bytes .*copy_ .*reads,"),
    (ask_until_it_has_happened, r"add_\S* .*default\) writes 4000 bytes .*copy_ .*reads,"),
    (free_what_another_stream_reads, r"freeing .*default\) writes 4000 bytes .*copy_ .*reads,"),
    (use_another_streams_new_memory, r"zero_ .*writes 4000 bytes .*allocating .*default\) writes,"),
    (use_freed_memory, r"cudaMemsetAsync .*writes 4000 bytes .*after freeing .*has taken them"),
    (read_the_result_of_a_collective, r"copy_ .*reads .*all-reduce of 1000 float32 .*writes,"),
    (write_the_input_of_a_collective, r"add_\S* .*writes .*all-gather of 1000 float32 .*reads,"),
    (read_page_locked_memory, r"the host touches page-locked memory at .*copy_"),
    (write_page_locked_memory, r"the host touches page-locked memory at .*copy_"),
]


def out_of_order() -> list[list[str]]:
    from scripts.testbed.device import inside

    return [inside.unordered(partial(program, False)) for program, _ in PROGRAMS]


def test_what_nothing_orders_is_told_without_any_delay(worlds: DeviceWorlds):
    [told] = worlds.run(out_of_order, 1, timeout_s=60)
    for (program, line), seen in zip(PROGRAMS, told, strict=True):
        assert seen and re.search(line, seen[0]), (program.__name__, seen)


def in_order() -> None:
    for program, _ in PROGRAMS:
        program(True)
    parts_of_one_matrix_on_two_streams()
    memory_again_on_its_stream()


def parts_of_one_matrix_on_two_streams() -> None:
    matrix = new(40 * 50).view(40, 50)
    ends = [on_side(matrix[:, part : part + 25].neg_, now()) for part in (0, 25)]
    ends += [on_side(matrix.t()[part::2].neg_, *ends) for part in (0, 1)]
    for end in ends:
        end.synchronize()


def memory_again_on_its_stream() -> None:
    """What a stream frees is at once its own again: it comes in the stream's order."""
    first = new().data_ptr()
    assert new().data_ptr() == first


def test_what_is_in_order_passes_also_under_delays(worlds: DeviceWorlds):
    for delays in (Delays(), Delays("uniform", 1, 3000), Delays("on-demand")):
        worlds.run(in_order, 1, delays=delays, timeout_s=60)


def test_the_run_ends_in_one_line_with_the_seed_and_where_asked_with_both_tracebacks(
    worlds: DeviceWorlds,
):
    line = r"emulated device: .*add_.* writes .*copy_.* reads, .*\(rank 0, law none, seed 5\)"
    with pytest.raises(DeviceFailure, match=line) as failure:
        env = {"ASYNCHZP_DEVICE_TRACEBACKS": "1"}
        worlds.run(
            write_what_another_stream_reads, 1, False, delays=Delays(seed=5), env=env, timeout_s=60
        )
    read, written = str(failure.value).split("comes from")[1:]
    assert "on_side" in read
    assert "write_what_another_stream_reads" in written
    assert "on_side" not in written
