# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of NCCL that tests on the emulated device rely on."""

import os
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from tests.device.programs import device_of_rank
from tests.support.selection import slow_unless

LONG = 700_000  # elements: longer than the place of a rank in shared memory
# Without a report that other ranks have to write too, for which torch would wait a minute.
AT_ONCE = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "50"}


def of_rank(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, (numel,), generator=generator).to(dtype)


def check_collectives(numel: int, dtype: torch.dtype) -> None:
    world, rank, device = dist.get_world_size(), dist.get_rank(), device_of_rank()
    inputs = [of_rank(other, numel * world, dtype) for other in range(world)]
    mine, stacked = inputs[rank].to(device), torch.stack(inputs)
    part = slice(rank * numel, (rank + 1) * numel)

    sums = {
        dist.ReduceOp.SUM: stacked.sum(0).to(dtype),
        dist.ReduceOp.MAX: stacked.amax(0),
        dist.ReduceOp.MIN: stacked.amin(0),
        dist.ReduceOp.PRODUCT: stacked.prod(0).to(dtype),
    }
    for op, expected in sums.items():
        whole, scattered = mine.clone(), mine.new_empty(numel)
        dist.all_reduce(whole, op)
        dist.reduce_scatter_tensor(scattered, mine, op)
        assert torch.equal(whole.cpu(), expected), op
        assert torch.equal(scattered.cpu(), expected[part]), op
    if dtype.is_floating_point:
        mean = mine.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert torch.equal(mean.cpu(), stacked.float().mean(0).to(dtype))
        # In bf16 torch 2.13 hands NCCL an fp32 factor, of which NCCL reads half: 0 in place of 0.5.
        is_right = dtype != torch.bfloat16 and dist.get_backend() == "nccl"
        for factor in (0.5, torch.tensor(0.5, device=device, dtype=dtype)) if is_right else ():
            op = dist._make_nccl_premul_sum(factor)  # pyright: ignore
            scaled = mine.new_empty(numel)
            dist.reduce_scatter_tensor(scaled, mine, op)
            assert torch.equal(scaled.cpu(), (0.5 * stacked).float().sum(0).to(dtype)[part])

    gathered = mine.new_empty(world * numel)
    dist.all_gather_into_tensor(gathered, mine[:numel])
    assert torch.equal(gathered.cpu(), stacked[:, :numel].flatten())

    exchanged = torch.empty_like(mine)
    dist.all_to_all_single(exchanged, mine)
    assert torch.equal(exchanged.cpu(), stacked[:, part].flatten())

    last = world - 1
    sent, reduced = mine.clone(), mine.clone()
    dist.broadcast(sent, last)
    dist.reduce(reduced, last)
    assert torch.equal(sent.cpu(), inputs[last])
    if rank == last:
        assert torch.equal(reduced.cpu(), sums[dist.ReduceOp.SUM])


def check_messages(numel: int) -> None:
    """Around a ring, both ways in one group; then uneven parts, which torch sends as messages."""
    world, rank, device = dist.get_world_size(), dist.get_rank(), device_of_rank()
    right, left = (rank + 1) % world, (rank - 1) % world
    mine = of_rank(rank, numel, torch.float32).to(device)
    from_left, from_right = torch.empty_like(mine), torch.empty_like(mine)
    both = [
        dist.P2POp(dist.isend, mine, right),
        dist.P2POp(dist.irecv, from_left, left),
        dist.P2POp(dist.isend, -mine, left),
        dist.P2POp(dist.irecv, from_right, right),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    # With one peer, which is left and right: what is sent first is received first.
    assert torch.equal(from_left.cpu(), of_rank(left, numel, torch.float32))
    assert torch.equal(from_right.cpu(), -of_rank(right, numel, torch.float32))
    split = [other + 1 for other in range(world)]
    uneven = torch.full((sum(split),), float(rank), device=device)
    out = torch.empty(world * (rank + 1), device=device)
    dist.all_to_all_single(out, uneven, [rank + 1] * world, split)
    assert out.tolist() == [float(other) for other in range(world) for _ in range(rank + 1)]


def check_groups() -> None:
    """Groups made by a split, and streams: what is launched on two of them runs in order."""
    world, rank, device = dist.get_world_size(), dist.get_rank(), device_of_rank()
    pairs = [[first, first + 1] for first in range(0, world, 2)]
    groups = [dist.new_group(pair) for pair in pairs]
    value = torch.full((3,), float(rank), device=device)
    dist.all_reduce(value, group=groups[rank // 2])
    assert value.tolist() == [float(sum(pairs[rank // 2]))] * 3


def check_calls_of_one_group() -> None:
    """Several operations in one group, of two communicators and on two streams."""
    world, device = dist.get_world_size(), device_of_rank()
    other = dist.new_group()
    values = [torch.full((3,), float(index), device=device) for index in range(4)]
    torch.cuda.synchronize()
    with dist._coalescing_manager(device=device):  # pyright: ignore
        for value in values[:2]:
            dist.all_reduce(value)
    with torch.cuda.stream(torch.cuda.Stream()):
        with dist._coalescing_manager(other, device):  # pyright: ignore
            for value in values[2:]:
                dist.all_reduce(value, group=other)
        torch.cuda.current_stream().synchronize()
    assert [value[0].item() for value in values] == [0, world, 2 * world, 3 * world]


def check_eight_bits() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = torch.full((5,), 0.5 * rank, device=device_of_rank()).to(torch.float8_e4m3fn)
    gathered = torch.empty(5 * world, dtype=mine.dtype, device=mine.device)
    dist.all_gather_into_tensor(gathered, mine)
    assert gathered.float().tolist() == [0.5 * other for other in range(world) for _ in range(5)]


def check_everything() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        check_collectives(5, dtype)
    check_collectives(LONG // dist.get_world_size(), torch.float32)
    check_messages(7)
    check_messages(LONG)
    check_groups()
    check_calls_of_one_group()
    check_eight_bits()


@pytest.mark.parametrize("world_size", [2, slow_unless(False, 4)])
def test_every_collective_and_message_gives_what_nccl_documents_under_delays(
    worlds: DeviceWorlds, world_size: int
):
    for seed, law in enumerate(LAWS[1:] if world_size == 2 else ["uniform"]):
        worlds.run(check_everything, world_size, delays=Delays(law, seed), timeout_s=120)


def split() -> tuple[int, int, list[float]]:
    """torch splits only groups that are bound to a device: `[3, 1]` and `[2]` of the ranks."""
    rank = dist.get_rank()
    dist.distributed_c10d._get_default_group().bound_device_id = device_of_rank()
    value = torch.full((3,), float(rank), device=device_of_rank())
    dist.all_reduce(value.clone())
    part = dist.split_group(split_ranks=[[1, 3], [2]])
    if rank == 0:
        assert part is dist.GroupMember.NON_GROUP_MEMBER or part is None
        return 0, 0, value.tolist()
    dist.all_reduce(value, group=part)
    return dist.get_rank(part), dist.get_world_size(part), value.tolist()


def race(num_launches: int) -> None:
    """Two threads launch at once, until one of them has an error."""
    sys.setswitchinterval(1e-5)  # on a busy machine too they meet
    groups = [dist.new_group(), dist.new_group()]
    value = torch.ones(3, device=device_of_rank())
    for group in groups:
        dist.all_reduce(value, group=group)
    torch.cuda.synchronize()
    errors: list[str] = []

    def launch(group: dist.ProcessGroup) -> None:
        mine = torch.ones(3, device=device_of_rank())
        try:
            for _ in range(num_launches):
                if not errors:
                    dist.all_reduce(mine, group=group)
        except Exception as error:
            errors.append(str(error))

    threads = [threading.Thread(target=launch, args=[group]) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(errors, flush=True)
    os._exit(3 if errors else 0)


def test_two_threads_that_launch_at_once_are_an_error_with_implicit_order_only(
    worlds: DeviceWorlds,
):
    in_order = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    with pytest.raises(DeviceFailure, match="host threads racing to launch NCCL on same device"):
        worlds.run(race, 1, 20_000, env=AT_ONCE | in_order, timeout_s=60)
    with pytest.raises(DeviceFailure) as without:
        worlds.run(race, 1, 200, env=AT_ONCE, timeout_s=60)
    assert "racing" not in str(without.value)


def cross_launches(seconds: float) -> list[float]:
    """Two communicators, launched in another order on each rank."""
    limit = timedelta(seconds=seconds)
    groups = [dist.new_group(timeout=limit), dist.new_group(timeout=limit)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    values = [torch.ones(3, device=device_of_rank()) for _ in groups]
    for value, group in zip(values, groups):
        dist.all_reduce(value, group=group)  # connects them in the same order
    torch.cuda.synchronize()
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    works = []
    for index in order:
        with torch.cuda.stream(streams[index]):
            works.append(dist.all_reduce(values[index], group=groups[index], async_op=True))
        time.sleep(0.2)
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    return [value.sum().item() for value in values]


@pytest.mark.parametrize("num_queues", [slow_unless(False, "8"), "32"])
def test_communicators_launched_in_different_orders_meet_where_queues_suffice(
    worlds: DeviceWorlds, num_queues: str
):
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": num_queues}
    assert worlds.run(cross_launches, 2, 30.0, env=env, timeout_s=60) == [[12.0, 12.0]] * 2


def test_with_one_hardware_queue_communicators_launched_in_different_orders_hang(
    worlds: DeviceWorlds,
):
    env = AT_ONCE | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with pytest.raises(DeviceFailure, match="Watchdog caught collective operation timeout"):
        worlds.run(cross_launches, 2, 3.0, env=env, timeout_s=60)
