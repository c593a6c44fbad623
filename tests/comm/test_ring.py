# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Rings of slots: how many there are of each size, and which one is handed out next."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_asynchzp.comm.ring import BufferRings, Slot

users = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(
    lambda sizes: [(size, name) for name, size in enumerate(sizes)]
)


def new_rings(users: list[tuple[int, int]], max_slots: int) -> BufferRings[tuple[int, int]]:
    """A user is (size, name); its slots have as many elements as its size."""
    return BufferRings(
        users,
        needs_slot=lambda user: user[0] > 1,
        size_of=lambda user: user[0],
        max_slots=max_slots,
        new_slot=lambda user: Slot(torch.zeros(user[0])),
    )


@given(users, st.integers(1, 4))
def test_each_size_that_needs_slots_has_as_many_as_users_and_never_more_than_allowed(users, most):
    rings = new_rings(users, most)
    found = sorted(slot.storage.numel() for slot in rings.slots)
    sizes = [size for size, _ in users if size > 1]
    assert found == sorted(s for s in set(sizes) for _ in range(min(most, sizes.count(s))))
    assert rings.nbytes == 4 * sum(found) and rings.num_in_use == 0


@given(st.data())
def test_the_slot_that_has_been_free_for_longest_is_handed_out_next(data):
    user, rings = (2, 0), new_rings([(2, name) for name in range(4)], 4)
    free, used = list(rings.slots), []
    for takes in data.draw(st.lists(st.booleans(), max_size=20)):
        if takes:
            slot = rings.acquire(user)
            assert slot is (free.pop(0) if free else None)
            used += [slot] if slot is not None else []
        elif used:
            slot = used.pop(data.draw(st.integers(0, len(used) - 1)))
            rings.release(user, slot, "an event")
            assert slot.free_event == "an event"
            free.append(slot)
        assert rings.num_in_use == len(used)


def test_a_slot_cannot_be_given_back_twice():
    user, rings = (2, 0), new_rings([(2, 0)], 1)
    slot = rings.acquire(user)
    rings.release(user, slot)
    with pytest.raises(RuntimeError, match="twice"):
        rings.release(user, slot)


def test_a_ring_that_grew_keeps_its_slots():
    user, rings = (3, 0), new_rings([(3, 0)], 1)
    slots = [rings.acquire(user), rings.grow(user)]
    assert rings.acquire(user) is None and rings.num_in_use == 2
    for slot in slots:
        rings.release(user, slot)
    assert [rings.acquire(user), rings.acquire(user)] == slots


def test_views_of_a_slot_are_seen_and_keep_the_memory_that_is_left_to_them():
    slot = Slot(torch.zeros(4))
    assert not slot.is_viewed()
    view = slot.storage[1:3]
    assert slot.is_viewed()
    slot.leave_storage()
    slot.storage.fill_(1.0)
    assert not slot.is_viewed() and view.tolist() == [0.0, 0.0]
