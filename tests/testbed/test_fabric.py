# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The backend on real ranks: gloo's results, ideal volumes, order, failures, an end."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from scripts.testbed import fabric
from scripts.testbed.fabric.wire import FabricError
from scripts.testbed.profile import NetworkProfile
from scripts.testbed.ranks import run_ranks
from tests.support.fabric import replace_default_group

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)


def whole_numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers, different on every rank: sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(97 * seed + dist.get_rank())
    return torch.randint(0, 7, (numel,), generator=generator).to(dtype)


def operations(dtype: torch.dtype) -> dict:
    """Every collective as a function of a group that returns the tensors it has filled."""
    n, r = dist.get_world_size(), dist.get_rank()
    sum_, last = dist.ReduceOp.SUM, n - 1
    ops = [sum_, dist.ReduceOp.MAX, dist.ReduceOp.MIN]
    if dtype.is_floating_point:
        ops.append(dist.ReduceOp.AVG)

    def all_reduce(group, op, numel):
        tensor = whole_numbers(numel, dtype, 1)
        dist.all_reduce(tensor, op, group=group)
        return [tensor]

    def all_reduce_of_a_transpose(group):
        tensor = whole_numbers(6, dtype, 2).view(2, 3).t()
        dist.all_reduce(tensor, group=group)
        return [tensor]

    def all_gather_flat(group):
        output = torch.full((n * 5,), 99).to(dtype)
        dist.all_gather_single(output, whole_numbers(5, dtype, 3), group=group)
        return [output]

    def all_gather_list(group):
        outputs = [torch.full((2, 2), 99).to(dtype) for _ in range(n)]
        dist.all_gather(outputs, whole_numbers(4, dtype, 4).view(2, 2), group=group)
        return outputs

    def reduce_scatter_flat(group, op):
        output = torch.full((3,), 99).to(dtype)
        dist.reduce_scatter_single(output, whole_numbers(3 * n, dtype, 5), op, group=group)
        return [output]

    def reduce_scatter_list(group):
        output = torch.full((3,), 99).to(dtype)
        inputs = list(whole_numbers(3 * n, dtype, 6).chunk(n))
        dist.reduce_scatter(output, inputs, group=group)
        return [output]

    def broadcast(group, root):
        tensor = whole_numbers(4, dtype, 7)
        dist.broadcast(tensor, root, group=group)
        return [tensor]

    def reduce(group, root):
        tensor = whole_numbers(4, dtype, 8)
        dist.reduce(tensor, root, group=group)
        return [tensor] if r == root else []  # others' results are not defined

    def all_to_all_even(group):
        output = torch.full((2 * n,), 99).to(dtype)
        dist.all_to_all_single(output, whole_numbers(2 * n, dtype, 9), group=group)
        return [output]

    def all_to_all_uneven(group):
        # Rank a has (a + b) % 3 rows for rank b.
        input_splits = [(r + peer) % 3 for peer in range(n)]
        input = whole_numbers(2 * sum(input_splits), dtype, 10).view(-1, 2)
        output = torch.full((sum(input_splits), 2), 99).to(dtype)
        dist.all_to_all_single(output, input, input_splits, input_splits, group=group)
        return [output]

    def scatter(group, root):
        output = torch.full((3,), 99).to(dtype)
        inputs = list(whole_numbers(3 * n, dtype, 11).chunk(n)) if r == root else None
        dist.scatter(output, inputs, root, group=group)
        return [output]

    def gather(group, root):
        outputs = [torch.full((3,), 99).to(dtype) for _ in range(n)] if r == root else None
        dist.gather(whole_numbers(3, dtype, 12), outputs, root, group=group)
        return outputs or []

    def coalesced(group):
        outputs = [torch.full((n * k,), 99).to(dtype) for k in (1, 4)]
        with dist._coalescing_manager(group):
            for k, output in zip((1, 4), outputs):
                dist.all_gather_single(output, whole_numbers(k, dtype, 13), group=group)
        return outputs

    def neighbours(group):
        if n == 1:
            return []
        output = torch.full((6,), 99).to(dtype)
        input = whole_numbers(6, dtype, 14)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, input, group=group, group_peer=(r + 1) % n),
                dist.P2POp(dist.irecv, output, group=group, group_peer=(r - 1) % n),
            ]
        ):
            work.wait()
        return [output]

    named = {
        f.__name__: f
        for f in (
            all_reduce_of_a_transpose,
            all_gather_flat,
            all_gather_list,
            reduce_scatter_list,
            all_to_all_even,
            all_to_all_uneven,
            coalesced,
            neighbours,
        )
    }
    for op in ops:
        for numel in (0, 1, 2, 7, 24):
            named[f"all_reduce {op} {numel}"] = lambda g, op=op, k=numel: all_reduce(g, op, k)
        named[f"reduce_scatter {op}"] = lambda g, op=op: reduce_scatter_flat(g, op)
    for root in {0, last}:
        for f in (broadcast, reduce, scatter, gather):
            named[f"{f.__name__} {root}"] = lambda g, f=f, root=root: f(g, root)
    return named


def compare_with_gloo() -> int:
    fabric.register()
    groups = dist.new_group(backend="gloo"), dist.new_group(backend="fabric")
    compared = 0
    for dtype in FLOATS + INTEGERS:
        for name, operation in operations(dtype).items():
            if name == "all_reduce_of_a_transpose":
                expected = [operation(groups[0])[0].contiguous()]
            else:
                expected = operation(groups[0])
            got = operation(groups[1])
            assert len(got) == len(expected), name
            for mine, theirs in zip(got, expected):
                assert torch.equal(mine, theirs), (name, dtype, mine, theirs)
                compared += 1
    return compared


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_collective_gives_what_gloo_gives(world_size):
    assert min(run_ranks(compare_with_gloo, world_size)) > 100


def python_objects_and_odd_dtypes() -> None:
    fabric.register()
    group = dist.new_group(backend="fabric")
    n, r = dist.get_world_size(), dist.get_rank()
    text: list = [None] * n
    dist.all_gather_object(text, {"rank": r}, group=group)
    assert text == [{"rank": i} for i in range(n)]
    text = [r]
    dist.broadcast_object_list(text, src=n - 1, group=group)
    assert text == [n - 1]
    parts = torch.full((n, 3), r).to(torch.float8_e4m3fn)
    gathered = torch.empty(n * n, 3, dtype=torch.float8_e4m3fn)
    dist.all_gather_single(gathered, parts, group=group)
    assert gathered.float().view(n, -1)[:, 0].tolist() == list(range(n))
    gathered.untyped_storage().resize_(0)  # what sharded trainers do with it
    halves = torch.full((4,), float(r + 1))
    dist.all_reduce(halves, torch._C._distributed_c10d._make_nccl_premul_sum(0.5), group=group)
    assert halves.tolist() == [0.25 * n * (n + 1)] * 4
    with pytest.raises(ValueError, match="AVG of torch.int64"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG, group=group)


def test_objects_fp8_and_scaled_sums_travel_and_an_average_of_integers_is_refused():
    run_ranks(python_objects_and_odd_dtypes, 3)


def count_bytes() -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    network = replace_default_group(NetworkProfile(ranks_per_node=2))
    last = dist.ReduceOp.SUM
    part, full = torch.ones(6), torch.ones(6 * n)
    nbytes = full.numel() * 4
    ideal = {  # kind: payload that all ranks send together
        "all_gather": ((n - 1) * nbytes, lambda: dist.all_gather_single(full, part)),
        "reduce_scatter": ((n - 1) * nbytes, lambda: dist.reduce_scatter_single(part, full, last)),
        "all_reduce": (2 * (n - 1) * 28, lambda: dist.all_reduce(torch.ones(7))),
        "broadcast": ((n - 1) * nbytes, lambda: dist.broadcast(full, 0)),
        "reduce": ((n - 1) * nbytes, lambda: dist.reduce(full, 0)),
        "all_to_all": ((n - 1) * nbytes, lambda: dist.all_to_all_single(full.clone(), full)),
        "barrier": (0, dist.barrier),
    }
    for kind, (nbytes, call) in ideal.items():
        before = network.counters.snapshot()
        call()
        gained = network.counters.since(before)
        assert {account.kind for account in gained} == {kind}
        (tally,) = gained.values()
        assert tally.operations == 1 and tally.busy_s > 0
        text = torch.tensor([tally.wire_nbytes, tally.node_nbytes])
        dist.all_reduce(text)
        assert text[0] == nbytes, (kind, n)
        is_border = r % 2 == 1 or r == n - 1  # whose successor in the ring is on another node
        if kind in ("all_gather", "reduce_scatter") and n > 2:
            assert tally.wire_nbytes == nbytes // n
            assert tally.node_nbytes == (tally.wire_nbytes if is_border else 0)
        if n <= 2:
            assert text[1] == 0  # one node


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_wire_bytes_are_the_ideal_volume_and_only_borders_send_to_other_nodes(world_size):
    run_ranks(count_bytes, world_size)


def take_time() -> tuple[float, float, float]:
    profile = NetworkProfile("test", inter_gbit=0.5, inter_latency_us=2000.0, ranks_per_node=2)
    replace_default_group(profile)
    full, part = torch.zeros(4 * 2**18), torch.zeros(2**18)
    dist.barrier()
    begin_s = time.monotonic()
    work = dist.all_gather_single(full, part, async_op=True)
    issued_s = time.monotonic()
    work.wait()
    return begin_s, issued_s, time.monotonic()


def test_a_collective_lasts_at_least_its_modelled_time_and_does_not_hold_the_caller_up():
    modelled_s = 3 * 2**20 * 8 / 0.5e9 + 2e-3  # three messages of 1 MiB leave a node
    begun, issued, ended = zip(*run_ranks(take_time, 4))  # of one clock
    assert max(ended) - min(begun) >= modelled_s
    assert min(i - b for b, i in zip(begun, issued)) < modelled_s / 2


def send_without_receiving() -> dict[str, float]:
    """Seconds of each operation in which rank 0 sends and gets nothing."""
    replace_default_group(NetworkProfile("test", inter_gbit=0.2, ranks_per_node=1))
    r, tensor, took_s = dist.get_rank(), torch.zeros(2**18), {}
    both = [tensor, tensor] if r == 0 else None
    operations = {
        "send": lambda: dist.recv(tensor, 0) if r else dist.send(tensor, 1),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "reduce": lambda: dist.reduce(tensor, 1),
        "scatter": lambda: dist.scatter(tensor.clone(), both, 0),
        "gather": lambda: dist.gather(tensor, None if r == 0 else [tensor, tensor.clone()], 1),
    }
    for name, operation in operations.items():
        dist.barrier()
        begin_s = time.monotonic()
        operation()
        took_s[name] = time.monotonic() - begin_s
    return took_s


def test_who_only_sends_is_held_up_by_its_own_card_too():
    modelled_s = 2**20 * 8 / 0.2e9
    took_s, _ = run_ranks(send_without_receiving, 2)
    assert len(took_s) == 5 and all(seconds >= modelled_s for seconds in took_s.values()), took_s


def many_threads_and_groups() -> None:
    network = replace_default_group()
    groups = [dist.new_group() for _ in range(3)]
    network.counters.start_trace()
    n = dist.get_world_size()
    tensors = {g: [torch.full((1000,), float(i)) for i in range(30)] for g in groups}

    def issue(group):  # a thread per group: the order between groups differs between ranks
        works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors[group]]
        for work in works:
            work.wait()

    threads = [threading.Thread(target=issue, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        assert [t[0].item() for t in tensors[group]] == [float(n * i) for i in range(30)]
    trace = network.counters.take_trace()
    for group in groups:
        spans = [span for span in trace if span.account.group == str(group)]
        numbers = [int(span.label.split("#")[1].split()[0]) for span in spans]
        assert numbers == list(range(1, 31))
        assert all(a.end_s <= b.begin_s for a, b in zip(spans, spans[1:]))


def test_operations_of_a_group_run_one_after_the_other_in_order_and_groups_side_by_side():
    run_ranks(many_threads_and_groups, 3)


def failures() -> list[str]:
    """Three faults, each in a group of its own; the messages that this rank gets."""
    r = dist.get_rank()
    fabric.register()
    groups = [dist.new_group(backend="fabric") for _ in range(4)]
    tensor, text = torch.ones(6), []

    def attempt(call) -> None:
        begin_s = time.monotonic()
        with pytest.raises((FabricError, ValueError)) as error:
            call()
        assert time.monotonic() - begin_s < 20  # not the group's limit of minutes
        text.append(str(error.value))

    # Different operations, different sizes: every rank hears of it, at its waiter.
    attempt(lambda: dist.all_reduce(tensor, group=groups[0]) if r else dist.barrier(groups[0]))
    attempt(lambda: dist.all_reduce(torch.ones(5 + (r == 1)), group=groups[1]))
    # A later operation of a group that has failed.
    attempt(lambda: dist.all_reduce(tensor, group=groups[1]))
    # Uneven by itself: refused where it is called, and the group lives on.
    attempt(lambda: dist.all_gather_single(torch.ones(7), torch.ones(2), group=groups[2]))
    dist.all_reduce(tensor, group=groups[2])
    # A future hears of a failure too.
    work = dist.all_reduce(torch.ones(5 + (r == 1)), group=groups[3], async_op=True)
    with pytest.raises(RuntimeError, match="all_reduce of group"):
        work.get_future().wait()
    assert work.is_completed() and not work.is_success() and work.exception() is not None
    return text


def test_a_fault_reaches_every_waiter_at_once_and_names_what_the_ranks_did():
    text = run_ranks(failures, 3)
    assert any("must issue the same operations" in messages[0] for messages in text)
    assert any("all_reduce #1 SUM 5 x float32" in messages[1] for messages in text)
    for messages in text:
        assert "failed before" in messages[2]
        assert "7 x float32 is not 3 times 2 x float32" in messages[3]
        assert not any("\n" in message for message in messages)


def lose_a_rank() -> str:
    fabric.register()
    group = dist.new_group(backend="fabric", timeout=timedelta(seconds=60))
    dist.barrier(group)
    if dist.get_rank() == 1:
        group.abort()
        return ""
    with pytest.raises(FabricError) as error:
        dist.all_reduce(torch.ones(100), group=group)
    return str(error.value)


def test_a_rank_that_is_gone_is_no_hang():
    begin_s = time.monotonic()
    text = run_ranks(lose_a_rank, 3)
    assert "lost group rank" in text[0] and "lost group rank" in text[2]
    assert time.monotonic() - begin_s < 40


def nothing_comes() -> str:
    fabric.register()
    group = dist.new_group(backend="fabric", timeout=timedelta(seconds=1))
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(FabricError) as error:
            dist.all_reduce(torch.ones(3), group=group)
        text = str(error.value)
    dist.barrier()  # of gloo
    return text


def test_an_operation_that_nobody_joins_ends_at_the_groups_time_limit():
    assert "no progress with group rank 1 within 1 s" in run_ranks(nothing_comes, 2)[0]


def start_over() -> None:
    for _ in range(3):
        replace_default_group()
        tensor = torch.ones(4)
        work = dist.all_reduce(tensor, async_op=True)
        group = dist.group.WORLD
        dist.new_group([0])  # size 1, and never used
        store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()  # what was submitted still runs
        assert work.is_completed() and tensor[0] == world_size
        with pytest.raises(FabricError, match="shut down"):
            group.allreduce([tensor])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def test_groups_can_be_destroyed_and_made_again():
    run_ranks(start_over, 2)


def send_out_of_step() -> None:
    """Each rank first sends two messages to everybody and only then receives, last peer first."""
    replace_default_group()
    n, r = dist.get_world_size(), dist.get_rank()
    works = [
        dist.isend(torch.full((50_000,), 10.0 * r + i), peer, tag=i)
        for peer in range(n)
        if peer != r
        for i in range(2)
    ]
    for peer in reversed(range(n)):
        if peer != r:
            for i in range(2):
                got = torch.empty(50_000)
                dist.recv(got, peer, tag=i)
                assert torch.all(got == 10.0 * peer + i)
    for work in works:
        work.wait()
    with pytest.raises(ValueError, match="not another rank"):
        dist.isend(torch.ones(1), r)


def test_messages_between_ranks_need_no_agreed_order_across_peers():
    run_ranks(send_out_of_step, 3)
