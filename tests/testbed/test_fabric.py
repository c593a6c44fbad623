# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The backend on real ranks: gloo's results, ideal volumes, modelled times, order, no hang."""

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

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def whole_numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, different on every rank: sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(97 + dist.get_rank())
    return torch.randint(0, 7, (numel,), generator=generator).to(dtype)


def all_results(group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """What every collective has filled on this rank."""
    n, r = dist.get_world_size(), dist.get_rank()
    results: dict[str, list[torch.Tensor]] = {}

    def filled(name: str, *numels: int) -> list[torch.Tensor]:
        results[name] = [torch.full((numel,), 99).to(dtype) for numel in numels]
        return results[name]

    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN]
    for op in [*ops, dist.ReduceOp.AVG] if dtype.is_floating_point else ops:
        for numel in (0, 1, 7, 24):
            tensor = whole_numbers(numel, dtype)
            dist.all_reduce(tensor, op, group=group)
            results[f"all_reduce {op} {numel}"] = [tensor]
        (output,) = filled(f"reduce_scatter {op}", 3)
        dist.reduce_scatter_single(output, whole_numbers(3 * n, dtype), op, group=group)
    for root in {0, n - 1}:
        results[f"broadcast {root}"] = [tensor := whole_numbers(4, dtype)]
        dist.broadcast(tensor, root, group=group)
        tensor = whole_numbers(4, dtype)
        dist.reduce(tensor, root, group=group)
        inputs = list(whole_numbers(3 * n, dtype).chunk(n))
        (output,) = filled(f"scatter {root}", 3)
        dist.scatter(output, inputs if r == root else None, root, group=group)
        outputs = filled(f"gather {root}", *[3] * n) if r == root else None
        dist.gather(inputs[0], outputs, root, group=group)
        if r == root:  # others' results are not defined
            results[f"reduce {root}"] = [tensor]
    (output,) = filled("all_gather_single", n * 5)
    dist.all_gather_single(output, whole_numbers(5, dtype), group=group)
    dist.all_gather(filled("all_gather", *[4] * n), whole_numbers(4, dtype), group=group)
    (output,) = filled("reduce_scatter", 3)
    dist.reduce_scatter(output, list(whole_numbers(3 * n, dtype).chunk(n)), group=group)
    splits = [(r + peer) % 3 for peer in range(n)]  # rank a has (a + b) % 3 for rank b
    (output,) = filled("all_to_all_single", sum(splits))
    dist.all_to_all_single(output, whole_numbers(sum(splits), dtype), splits, splits, group=group)
    with dist._coalescing_manager(group):
        for k, output in zip((1, 4), filled("coalesced", n, 4 * n)):
            dist.all_gather_single(output, whole_numbers(k, dtype), group=group)
    if n > 1:
        (output,), input = filled("neighbours", 6), whole_numbers(6, dtype)
        send = dist.P2POp(dist.isend, input, group=group, group_peer=(r + 1) % n)
        receive = dist.P2POp(dist.irecv, output, group=group, group_peer=(r - 1) % n)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
    return results


def compare_with_gloo() -> None:
    fabric.register()
    gloo, ours = dist.new_group(backend="gloo"), dist.new_group(backend="fabric")
    for dtype in DTYPES:
        expected, results = all_results(gloo, dtype), all_results(ours, dtype)
        assert results.keys() == expected.keys() and len(results) > 20
        for name, tensors in results.items():
            for mine, theirs in zip(tensors, expected[name], strict=True):
                assert torch.equal(mine, theirs), (name, dtype, mine, theirs)
    noise = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.all_reduce(noise, group=ours)
    of_ranks = [torch.empty_like(noise) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, noise, group=gloo)
    assert all(torch.equal(other, noise) for other in of_ranks)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_collective_gives_what_gloo_gives_and_sums_the_same_bits_on_every_rank(world_size):
    run_ranks(compare_with_gloo, world_size)


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


def many_threads_and_groups() -> None:
    replace_default_group()
    groups = [dist.new_group() for _ in range(3)]
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


def test_groups_that_threads_use_in_another_order_on_every_rank_do_not_mix():
    run_ranks(many_threads_and_groups, 3)


def failures() -> list[str]:
    """Faults in groups of their own; the messages that this rank gets."""
    r, text = dist.get_rank(), []
    fabric.register()
    others, sizes, uneven = (dist.new_group(backend="fabric") for _ in range(3))

    def attempt(call) -> None:
        begin_s = time.monotonic()
        with pytest.raises((FabricError, ValueError)) as error:
            call()
        assert time.monotonic() - begin_s < 20  # not the group's limit of minutes
        text.append(str(error.value))

    attempt(lambda: dist.all_reduce(torch.ones(6), group=others) if r else dist.barrier(others))
    attempt(lambda: dist.all_reduce(torch.ones(5 + (r == 1)), group=sizes))
    attempt(lambda: dist.all_reduce(torch.ones(6), group=sizes))  # a group that has failed
    # Wrong by itself: refused where it is called, and the group lives on.
    attempt(lambda: dist.all_gather_single(torch.ones(7), torch.ones(2), group=uneven))
    dist.all_reduce(torch.ones(6), group=uneven)
    return text


def test_a_fault_reaches_every_waiter_at_once_and_names_what_the_ranks_did():
    text = run_ranks(failures, 3)
    assert any("must issue the same operations" in messages[0] for messages in text)
    assert any("all_reduce #1 SUM 5 x float32" in messages[1] for messages in text)
    for messages in text:
        assert "failed before" in messages[2]
        assert "7 x float32 is not 3 times 2 x float32" in messages[3]
        assert not any("\n" in message for message in messages)


def lose_a_rank() -> tuple[str, str]:
    """What a rank hears of a peer that has gone, and of one that does not join in."""
    fabric.register()
    group = dist.new_group(backend="fabric", timeout=timedelta(seconds=60))
    impatient = dist.new_group([0, 2], backend="fabric", timeout=timedelta(seconds=1))
    dist.barrier(group)
    if dist.get_rank() == 1:
        group.abort()
        return "", ""
    with pytest.raises(FabricError) as gone:
        dist.all_reduce(torch.ones(100), group=group)
    if dist.get_rank() == 2:
        time.sleep(3)
        return str(gone.value), ""
    with pytest.raises(FabricError) as late:
        dist.all_reduce(torch.ones(3), group=impatient)
    return str(gone.value), str(late.value)


def test_a_rank_that_is_gone_or_does_not_come_is_no_hang():
    begin_s = time.monotonic()
    (gone, late), _, (also_gone, _) = run_ranks(lose_a_rank, 3)
    assert "lost group rank" in gone and "lost group rank" in also_gone
    assert "no progress with group rank 1 within 1 s" in late
    assert time.monotonic() - begin_s < 40
