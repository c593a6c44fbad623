# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The modelled network without ranks: profiles and clocks."""

import os
import threading
import time
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    "env, word",
    [
        ({"ASYNCHZP_FABRIC_PROFILE": "token-ring"}, "ethernet-1g"),
        ({"ASYNCHZP_FABRIC_INTER_GBIT": "fast"}, "ASYNCHZP_FABRIC_INTER_GBIT=fast"),
        ({"ASYNCHZP_FABRIC_INTER_GBIT": "nan"}, "inter_gbit"),
        ({"ASYNCHZP_FABRIC_INTRA_LATENCY_US": "-1"}, "intra_latency_us"),
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
