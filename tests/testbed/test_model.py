# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The modelled network without ranks: profiles, clocks, counters."""

import os
import threading
import time
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.testbed.counters import Account, Counters, Span, Tally, total
from scripts.testbed.fabric import nic
from scripts.testbed.profile import (
    PROFILES,
    NetworkProfile,
    ProfileError,
    named_profile,
    profile_from_env,
    profile_to_env,
)


def new_clocks(profile: NetworkProfile) -> nic.NicClocks:
    file = os.memfd_create("test")
    os.ftruncate(file, nic._nbytes())
    return nic.NicClocks(profile, file)


@given(
    st.sampled_from(sorted(PROFILES)),
    st.floats(0.1, 100) | st.just(inf),
    st.integers(1, 64),
    st.floats(0, 1e4),
)
def test_a_profile_survives_the_way_through_the_environment(name, gbit, ranks, latency_us):
    profile = named_profile(
        name, intra_gbit=gbit, ranks_per_node=ranks, inter_latency_us=latency_us
    )
    assert profile_from_env(profile_to_env(profile)) == profile


def test_without_settings_nothing_is_modelled_and_torchruns_local_ranks_are_a_node():
    profile = profile_from_env({"LOCAL_WORLD_SIZE": "4"})
    assert not profile.is_modelled
    assert [profile.node_of(rank) for rank in (0, 3, 4)] == [0, 0, 1]


@pytest.mark.parametrize(
    "env, word",
    [
        ({"ASYNCHZP_FABRIC_PROFILE": "token-ring"}, "ethernet-1g"),
        ({"ASYNCHZP_FABRIC_INTER_GBIT": "fast"}, "ASYNCHZP_FABRIC_INTER_GBIT=fast"),
        ({"ASYNCHZP_FABRIC_INTER_GBIT": "0"}, "inter_gbit"),
        ({"ASYNCHZP_FABRIC_INTER_GBIT": "nan"}, "inter_gbit"),
        ({"ASYNCHZP_FABRIC_INTRA_LATENCY_US": "-1"}, "intra_latency_us"),
        ({"ASYNCHZP_FABRIC_RANKS_PER_NODE": "0"}, "ranks_per_node"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line_that_names_it(env, word):
    with pytest.raises(ProfileError) as output:
        profile_from_env(env)
    assert word in str(output.value) and "\n" not in str(output.value)


MESSAGES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(5000, 10**7)),
    min_size=1,
    max_size=20,
)


@given(MESSAGES)
@settings(deadline=None)
def test_a_card_carries_no_more_than_its_speed(messages):
    profile = NetworkProfile("test", inter_gbit=1.0, intra_gbit=4.0, inter_latency_us=50.0)
    clocks = new_clocks(profile)
    begin = time.monotonic()
    carried: dict[tuple, list[tuple[float, float]]] = {}
    for source, destination, nbytes in messages:
        is_inter = source != destination
        duration_s = nbytes * 8e-9 / (1.0 if is_inter else 4.0)
        left, arrival = clocks.reserve(source, destination, nbytes)
        assert arrival - left == pytest.approx(50e-6 if is_inter else 0.0)
        cards = [("up", source), ("down", destination)] if is_inter else [("loop", source)]
        for card in cards:
            carried.setdefault(card, []).append((left, duration_s))
    for passed in carried.values():
        sent_s = 0.0
        for left, duration_s in sorted(passed):
            sent_s += duration_s
            assert left >= begin + sent_s - 1e-6


def test_messages_of_one_pair_arrive_in_their_order_without_a_pause():
    clocks = new_clocks(NetworkProfile("test", inter_gbit=1.0))
    begin = time.monotonic()
    lefts = [clocks.reserve(0, 1, 10**8)[0] - begin for _ in range(3)]
    assert lefts == pytest.approx([0.8, 1.6, 2.4], abs=0.3)


def test_a_card_that_waits_for_a_busy_peer_serves_others_meanwhile():
    clocks = new_clocks(NetworkProfile("test", inter_gbit=1.0))
    begin = time.monotonic()
    second = 125 * 10**6  # bytes
    sent = [(0, 1, 2), (2, 1, 1), (2, 0, 1), (3, 0, 2)]  # 2's first waits for what 1 receives
    lefts = [clocks.reserve(to, at, n * second)[0] - begin for to, at, n in sent]
    assert lefts == pytest.approx([2.0, 3.0, 1.0, 3.0], abs=0.4)


def test_a_message_of_one_packet_passes_between_those_of_others():
    clocks = new_clocks(NetworkProfile("test", inter_gbit=1.0))
    begin = time.monotonic()
    clocks.reserve(0, 1, 10**9)
    assert clocks.reserve(0, 1, 64)[0] - begin < 4


SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda one: (one[0], sum(one))), max_size=8
).map(sorted)


@given(SPANS, st.integers(0, 20), st.integers(1, 20))
def test_a_message_takes_the_first_moments_that_are_free(taken, begin, length):
    found = nic.first_free(taken, begin, length)
    moments = [moment for span in found for moment in range(*span)]
    free = [
        moment
        for moment in range(begin, 100)
        if not any(low <= moment < high for low, high in taken)
    ]
    assert moments == free[:length]
    together = nic.joined(sorted(taken + found))
    assert {m for span in together for m in range(*span)} == {
        m for span in taken + found for m in range(*span)
    }
    assert all(before[1] < after[0] for before, after in pairwise(together))


def test_a_calendar_that_is_full_forgets_gaps_and_no_message():
    clocks = new_clocks(NetworkProfile("test", inter_gbit=1.0))
    begin = time.monotonic()
    second, senders = 125 * 10**6, 100
    for sender in range(1, senders):
        clocks.reserve(sender, senders + sender, 2 * (sender - 1) * second)
        left, _ = clocks.reserve(sender, 0, second)  # every other second of node 0 stays free
        assert left - begin == pytest.approx(2 * sender - 1, abs=0.5)
    left, _ = clocks.reserve(senders, 0, second)
    assert left - begin > 3 and (left - begin) % 2 < 0.5


def test_threads_and_processes_share_one_clock():
    clocks = new_clocks(NetworkProfile("test", inter_gbit=1.0))
    first = clocks.reserve(0, 1, 0)[0]
    nbytes, count = 10**6, 2000

    def reserve_many():
        for _ in range(count):
            clocks.reserve(0, 1, nbytes)

    threads = [threading.Thread(target=reserve_many) for _ in range(3)]
    child = os.fork()
    if child == 0:
        reserve_many()
        os._exit(0)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
    least_s = (4 * count + 1) * nbytes * 8e-9
    assert clocks.reserve(0, 1, nbytes)[0] - first >= least_s - 1e-9


def test_counters_give_what_was_added_since_a_snapshot_by_group_and_kind():
    counters = Counters()
    gather, reduce = Account("a 0,1", "all_gather"), Account("b 0,1", "all_reduce")
    counters.add(Span(gather, "", 1.0, 1.5), 8, 4)
    before = counters.snapshot()
    counters.start_trace()
    counters.add(Span(gather, "", 2.0, 2.25), 2, 2)
    counters.add(Span(reduce, "", 2.0, 3.0), 1, 0)
    gained = counters.since(before)
    assert gained == {gather: Tally(1, 2, 2, 0.25), reduce: Tally(1, 1, 0, 1.0)}
    assert total(gained.values()) == Tally(2, 3, 2, 1.25)
    assert [span.account for span in counters.take_trace()] == [gather, reduce]
