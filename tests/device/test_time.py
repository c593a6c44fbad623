# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of the emulated device's own clock: what kernels and collectives of a stated time wait for,
with one hardware queue and many, with and without NCCL's implicit launch order."""

from math import inf

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.profile import NetworkProfile
from tests.device.programs import device_of_rank
from tests.support.selection import slow_unless

# 1 Gbit/s for both ranks of a node together: a message of 25 kB from each takes 0.4 ms, and 0.6
# more to arrive.
NETWORK = NetworkProfile("test", intra_gbit=1.0, intra_latency_us=600.0, ranks_per_node=2)
NUMEL = 25_000 // 4
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
MANY_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
IN_ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


class Clock:
    """Marks in streams, in milliseconds of the device's clock since it was started."""

    def __init__(self, host_gbit: float = inf):
        from scripts.testbed.device import inside

        inside.state_time(NETWORK, host_gbit)
        self.compute = lambda ms: inside.compute(1e-3 * ms)
        self._start, self._marks = self._mark(), []

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        self._marks.append(self._mark())

    def marks(self) -> list[float]:
        torch.cuda.synchronize()
        return [round(self._start.elapsed_time(mark), 3) for mark in self._marks]


def shared_device() -> list[float]:
    clock, side = Clock(), torch.cuda.Stream()
    clock.compute(3)
    clock.mark()
    with torch.cuda.stream(side):
        clock.compute(2)
        clock.mark()
    torch.ones(8, device=device_of_rank()).add_(1)  # states no time
    clock.mark()
    ended = torch.cuda.Event()
    ended.record()
    ended.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        clock.mark()  # issued by a host that has seen 3 ms go by
    return clock.marks()


def test_computations_of_two_streams_share_the_device_and_the_host_sees_what_it_has_waited_for(
    worlds: DeviceWorlds,
):
    [[first, second, after, host]] = worlds.run(shared_device, 1)
    assert (first, second) in ((3, 5), (5, 2))
    assert after == first == host


def overlapping() -> list[float]:
    """A collective beside computation, and then one whose end a third stream waits for."""
    values = [torch.ones(NUMEL, device=device_of_rank()) for _ in range(2)]
    gathered = torch.empty(2 * NUMEL, device=device_of_rank())
    for value in values:
        dist.all_reduce(value)  # makes the communicator and its stream
    side = torch.cuda.Stream()
    clock = Clock()
    if dist.get_rank():
        clock.compute(10)  # the other rank's collective waits
    gather = dist.all_gather_into_tensor(gathered, values[0], async_op=True)
    clock.compute(3)
    clock.mark()
    with torch.cuda.stream(side):
        gather.wait()
        clock.mark()
    clock.compute(1)  # with one queue behind that wait
    clock.mark()
    return clock.marks()


@pytest.mark.parametrize("law", [slow_unless(law in ("none", "on-demand"), law) for law in LAWS])
def test_a_collective_begins_with_its_last_rank_and_overlaps_and_a_wait_holds_up_its_queue(
    worlds: DeviceWorlds, law: str
):
    """Whatever the law of delay: nothing that takes time on this machine counts."""
    delays = Delays(law, 1, 3000)
    many = worlds.run(overlapping, 2, env=MANY_QUEUES, delays=delays)
    one = worlds.run(overlapping, 2, env=ONE_QUEUE, delays=delays)
    assert many == [[3, 11, 4], [13, 11, 14]]
    assert one == [[3, 11, 12], [13, 11, 14]]


def all_costs() -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    one = torch.ones(NUMEL, device=device_of_rank())
    all_of = torch.ones(world * NUMEL, device=device_of_rank())
    dist.all_reduce(one)
    if rank == 0:
        dist.send(one, 1)
    if rank == 1:
        dist.recv(one, 0)
    clock = Clock()
    for call in (
        lambda: dist.all_gather_into_tensor(all_of, one),
        lambda: dist.reduce_scatter_tensor(one, all_of),
        lambda: dist.all_reduce(all_of),
        lambda: dist.broadcast(one, 0),
        lambda: dist.all_to_all_single(all_of, all_of.clone()),
    ):
        call()
        clock.mark()
    if rank == 0:
        dist.send(one, 1)
    if rank == 1:
        dist.recv(one, 0)
    if rank < 2:
        clock.mark()
    return clock.marks()


def test_collectives_take_the_time_of_rings_over_the_stated_links(worlds: DeviceWorlds):
    """Two ranks: a message each way and step, 1 ms; an all-reduce has two steps of halves."""
    sender, receiver = worlds.run(all_costs, 2)
    assert sender[:5] == receiver[:5] == [1, 2, 4, 5, 6]
    assert receiver[5] == pytest.approx(6.8)  # alone on the link


def spans_of_one_step() -> list[tuple[str, float, float]]:
    """Computation, unlike numbers of tokens for the ranks, this one among them, and a sum."""
    from scripts.testbed.device import inside

    rank, one = dist.get_rank(), torch.ones(NUMEL, device=device_of_rank())
    sent = torch.ones(2 * NUMEL, device=device_of_rank())
    splits = [NUMEL // 2, NUMEL // 2 * 3] if rank == 0 else [NUMEL // 2 * 3, NUMEL // 2]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, splits, splits)
    clock = Clock()
    clock.compute(2)
    dist.all_to_all_single(received, sent, splits, splits)
    dist.all_reduce(one)
    seen = inside.spans()
    assert inside.spans() == []
    return [(one.what, round(1e3 * one.begin_s, 3), round(1e3 * one.end_s, 3)) for one in seen]


def test_what_has_taken_time_is_listed_and_what_a_rank_sends_itself_takes_none(
    worlds: DeviceWorlds,
):
    for seen in worlds.run(spans_of_one_step, 2):
        assert seen == [("compute", 0, 2), ("send/recv", 2, 2.9), ("all-reduce", 2.9, 4.5)]


def two_communicators() -> list[float]:
    """The first one launched waits for 5 ms of computation; the second for nothing."""
    groups = [dist.new_group(), dist.new_group()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    values = [torch.ones(2 * NUMEL, device=device_of_rank()) for _ in groups]
    torch.cuda.synchronize()
    for value, group, stream in zip(values, groups, streams):
        with torch.cuda.stream(stream):
            dist.all_reduce(value, group=group)
    clock = Clock()
    with torch.cuda.stream(streams[0]):
        clock.compute(5)
    for value, group, stream in zip(values, groups, streams):
        with torch.cuda.stream(stream):
            dist.all_reduce(value, group=group)
            clock.mark()
    return clock.marks()


def test_with_implicit_order_a_launch_waits_for_the_begin_of_the_one_before_and_not_for_its_end(
    worlds: DeviceWorlds,
):
    for delays in (Delays(), Delays("uniform", 3, 3000)):
        free = worlds.run(two_communicators, 2, env=MANY_QUEUES, delays=delays)
        in_order = worlds.run(two_communicators, 2, env=MANY_QUEUES | IN_ORDER, delays=delays)
        assert free == [[7, 2]] * 2
        assert in_order == [[7, 7]] * 2
