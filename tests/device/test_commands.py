# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank asks of the emulated device is recorded, with all the waits of streams and host."""

from typing import Any

import torch
import torch.distributed as dist

from scripts.launch_order.commands import commands_of
from scripts.launch_order.queues import dealt
from scripts.testbed.device.worlds import DeviceWorlds

MANY = 32


def collectives_that_wait() -> list[str]:
    """On two communicators in turns: the second of each pair waits for the first by an event, by
    the host, or not at all."""
    from scripts.testbed.device import inside

    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [torch.ones(4, device="cuda") for _ in groups]

    def start(index: int) -> dist.Work:
        work = dist.all_reduce(tensors[index], group=groups[index], async_op=True)
        assert work is not None
        return work

    for index in range(2):
        start(index).wait()
    inside.record_commands()
    works = [start(0), start(1)]  # nothing
    works.append(start(0))
    works[-1].wait()  # an event
    works.append(start(1))
    works.append(start(0))
    torch.cuda.synchronize()  # the host
    works.append(start(1))
    if dist.get_rank() == 0:
        peer_to = [dist.P2POp(dist.isend, tensors[0], 1, groups[0])]
    else:
        peer_to = [dist.P2POp(dist.irecv, tensors[0], 0, groups[0])]
    works += dist.batch_isend_irecv(peer_to)
    lines = inside.recorded_commands()
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    return lines


def test_collectives_and_all_that_they_wait_for_are_in_the_record_of_each_rank(
    worlds: DeviceWorlds,
):
    programs = [commands_of(lines) for lines in worlds.run(collectives_that_wait, 2)]
    orders = [[met for one in program for met in one.meetings] for program in programs]
    assert orders[0] == orders[1]
    assert [one.ranks for one in orders[0]] == [(0, 1)] * 7
    assert [one.is_message for one in orders[0]] == [False] * 6 + [True]
    for program in programs:
        first, second = dealt(program, MANY)
        assert [kernel.needs for kernel in second] == [(0, 0), (2, 1), (3, 2)]
        assert [kernel.needs for kernel in first] == [(0, 0), (1, 0), (2, 0), (3, 2)]
        (everything,) = dealt(program, 1)
        assert [kernel.needs for kernel in everything] == [(place,) for place in range(7)]
