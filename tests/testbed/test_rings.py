# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The algorithms of the collectives, on ranks that are threads with queues between them."""

import queue
import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.testbed.fabric import rings
from scripts.testbed.fabric.reduction import reduction_of

WORLDS = st.integers(1, 5)


class QueueLink:
    """A way to the other ranks that keeps what it sent."""

    def __init__(self, rank: int, size: int, queues: dict):
        self.rank, self.size, self._queues = rank, size, queues
        self.nbytes = 0

    def exchange(self, send=None, to=0, receive=None, source=0):
        if send is not None:
            self.nbytes += send.numel() * send.element_size()
            self._queues[self.rank, to].put(send.clone())
        if receive is not None:
            received = self._queues[source, self.rank].get(timeout=10)
            assert received.shape == receive.shape
            receive.copy_(received)


def on_all(size: int, run) -> list[QueueLink]:
    """Call run(link) for every rank at once."""
    queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    links = [QueueLink(rank, size, queues) for rank in range(size)]
    errors = []

    def rank_main(link):
        try:
            run(link)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all(q.empty() for q in queues.values())
    return links


def noise(size: int, numel: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(size)]


@given(WORLDS, st.integers(0, 40), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_an_all_reduce_is_equal_on_all_ranks_and_adds_up_in_the_documented_order(size, numel, seed):
    inputs = noise(size, numel, seed)
    expected = []
    for owner, chunks in enumerate(zip(*(tensor.tensor_split(size) for tensor in inputs))):
        partial = chunks[(owner + 1) % size]
        for step in range(2, size + 1):
            partial = partial + chunks[(owner + step) % size]
        expected.append(partial)
    results = [tensor.clone() for tensor in inputs]
    how = reduction_of(None, results)
    links = on_all(size, lambda link: rings.ring_all_reduce(link, results[link.rank], how))
    for result in results:
        assert torch.equal(result, torch.cat(expected))
    assert sum(link.nbytes for link in links) == 2 * (size - 1) * numel * 4


@given(WORLDS, st.integers(0, 9), st.integers(0, 1000), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_reduce_scatter_then_an_all_gather_is_the_all_reduce(size, shard, seed, in_place):
    inputs = noise(size, size * shard, seed)
    reduced = [tensor.clone() for tensor in inputs]
    how = reduction_of(None, reduced)
    on_all(size, lambda link: rings.ring_all_reduce(link, reduced[link.rank], how))

    outputs = [torch.full((size * shard,), torch.nan) for _ in range(size)]
    before = [tensor.clone() for tensor in inputs]

    def run(link):
        own_inputs = inputs[link.rank].view(size, shard)
        chunks = outputs[link.rank].view(size, shard)
        own = own_inputs[link.rank] if in_place else chunks[link.rank]
        rings.ring_reduce_scatter(link, own_inputs, own, how)
        chunks[link.rank].copy_(own)
        rings.ring_all_gather(link, chunks)

    on_all(size, run)
    for rank in range(size):
        assert torch.equal(outputs[rank], reduced[rank])
        own = slice(rank * shard, (rank + 1) * shard) if in_place else slice(0, 0)
        before[rank][own] = inputs[rank][own]
        assert torch.equal(inputs[rank], before[rank])  # nothing else of the input has changed


@given(WORLDS, st.integers(0, 4), st.sampled_from([0, 1, 5, 16384 * 3, 16384 * 20 + 7]))
@settings(max_examples=40, deadline=None)
def test_chains_carry_each_byte_over_each_link_once(size, root, numel):
    root %= size
    inputs = [torch.full((numel,), float(rank + 1)) for rank in range(size)]
    copies = [tensor.clone() for tensor in inputs]
    links = on_all(size, lambda link: rings.chain_broadcast(link, copies[link.rank], root))
    assert all(torch.equal(copy, inputs[root]) for copy in copies)
    assert sum(link.nbytes for link in links) == (size - 1) * numel * 4

    how = reduction_of(None, inputs)
    partial = [tensor.clone() for tensor in inputs]
    links = on_all(size, lambda link: rings.chain_reduce(link, partial[link.rank], root, how))
    for rank in range(size):
        expected = sum(inputs) if rank == root else inputs[rank]
        assert torch.equal(partial[rank], expected)
    assert sum(link.nbytes for link in links) == (size - 1) * numel * 4


@given(WORLDS, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_an_all_to_all_with_any_splits_moves_each_piece_once(size, random):
    numels = [[random.randint(0, 5) for _ in range(size)] for _ in range(size)]
    sent = [
        [torch.full((numels[a][b],), float(10 * a + b)) for b in range(size)] for a in range(size)
    ]
    got = [[torch.empty(numels[a][b]) for a in range(size)] for b in range(size)]
    links = on_all(
        size, lambda link: rings.pairwise_all_to_all(link, got[link.rank], sent[link.rank])
    )
    for a in range(size):
        for b in range(size):
            assert torch.equal(got[b][a], sent[a][b])
        foreign = sum(numels[a]) - numels[a][a]
        assert links[a].nbytes == 4 * foreign


@given(WORLDS)
@settings(max_examples=10, deadline=None)
def test_nobody_leaves_a_barrier_before_all_have_come(size):
    come, seen = set(), []

    def run(link):
        come.add(link.rank)
        rings.dissemination_barrier(link)
        seen.append(len(come))

    on_all(size, run)
    assert seen == [size] * size
