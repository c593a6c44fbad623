# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The modelled network without ranks: profiles and clocks."""

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.testbed.fabric import nic
from scripts.testbed.profile import NetworkProfile


def new_clocks(profile: NetworkProfile) -> nic.NicClocks:
    file = os.memfd_create("test")
    os.ftruncate(file, nic._nbytes())
    return nic.NicClocks(profile, file)


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
