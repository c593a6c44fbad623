# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Each receiver takes a tensor from one holder: its own part from itself, and where all ranks
receive, no holder sends more than another."""

from collections import Counter

import pytest

from megatron_asynchzp.hf.routes import Routes, sharing_block

TP, DP, PP = 2, 4, 2
DENSE = [
    tuple(tensor + TP * (data + DP * stage) for data in range(DP))
    for stage in range(PP)
    for tensor in range(TP)
]
# Two expert-parallel ranks among those of a data-parallel group.
EXPERTS = [group[expert::2] for group in DENSE for expert in range(2)]
RANKS = range(TP * DP * PP)


@pytest.mark.parametrize("receivers", [RANKS, [0], [3, 8, 9]])
def test_each_receiver_has_one_source_among_the_holders_and_holders_take_their_own(receivers):
    routes = Routes(receivers, DENSE)
    for holders in [*DENSE, *EXPERTS]:
        sources = routes.sources(holders)
        assert list(sources) == sorted(receivers)
        for receiver, source in sources.items():
            assert source in holders
            assert source == receiver or receiver not in holders
        assert routes.serves(holders, list(sources.values())[:1])
        assert not routes.serves(holders, set(RANKS) - set(sources.values()))


def test_where_all_ranks_receive_holders_send_equally_often():
    routes = Routes(RANKS, DENSE)
    for holders in [*DENSE, *EXPERTS]:
        sent = Counter(routes.sources(holders).values())
        assert set(sent.values()) == {len(RANKS) // len(holders)}


def test_every_copy_of_a_model_supplies_itself():
    for receiver, source in Routes(RANKS, DENSE).sources(DENSE[-1]).items():
        assert receiver // TP % DP == source // TP % DP


def test_ranks_that_gather_together_are_consecutive_holders():
    holders = (1, 3, 5, 7)
    assert [sharing_block(holders, rank, 2) for rank in holders] == [(1, 3)] * 2 + [(5, 7)] * 2
