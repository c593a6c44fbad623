# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Places in an arena: which one is handed out, whose readers its next writer waits for, and what
happens to memory that somebody else views.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_asynchzp.engine.comm.arena import Arena

CPU = torch.device("cpu")
calls = st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), max_size=30)


def new_arena(nbytes: int = 10) -> Arena:
    return Arena(nbytes, CPU, lambda: None)


def acquire(arena: Arena, numel: int, from_top: bool = False, **more):
    span = arena.hold(numel, from_top)
    return None if span is None else arena.place_at(span, numel, numel, torch.uint8, **more)


def replay(nbytes: int, program) -> list:
    """Acquire places or give the oldest one back, by `program`; the spans that were held."""
    arena, held, spans = new_arena(nbytes), [], []
    for numel, from_top, gives_back in program:
        if gives_back and held:
            arena.release(held.pop(0).extent)
        elif (place := acquire(arena, numel, from_top)) is not None:
            held.append(place)
        else:
            free = nbytes - sum(stop - start for start, stop in spans[-1])
            assert numel > 1 or free == 0  # one byte always finds the last free one
        spans.append(sorted(place.extent for place in held))
        assert arena.num_held == len(held)
    return spans


@given(st.integers(5, 12), calls)
def test_places_never_overlap_lie_within_and_depend_on_the_order_of_calls_alone(nbytes, program):
    spans = replay(nbytes, program)
    assert spans == replay(nbytes, program)
    for held in spans:
        edges = [edge for span in held for edge in span]
        assert edges == sorted(edges) and all(0 <= edge <= nbytes for edge in edges)


def test_users_in_turn_at_opposite_ends_leave_room_for_the_next_whatever_their_sizes():
    """Memory for the largest two neighbours is never too fragmented for the next one."""
    for sizes in itertools.product((1, 2, 3), repeat=5):
        arena = new_arena(max(map(sum, itertools.pairwise(sizes))))
        before = None
        for index, size in enumerate(sizes):
            place = acquire(arena, size, from_top=index % 2 == 1)
            assert place is not None, sizes
            if before is not None:
                arena.release(before.extent)
            before = place


def test_the_next_writer_waits_for_the_last_user_of_every_byte_and_for_no_one_before_it():
    arena = new_arena(6)
    first, second = acquire(arena, 2), acquire(arena, 3)
    arena.release(first.extent, "reader of 0-2")
    arena.release(second.extent, "reader of 2-5")
    wide = acquire(arena, 4)
    assert list(wide.ready) == ["reader of 0-2", "reader of 2-5"]
    arena.release(wide.extent, "reader of 0-4")
    assert list(acquire(arena, 2).ready) == ["reader of 0-4"]
    assert list(acquire(arena, 3).ready) == ["reader of 2-5", "reader of 0-4"]


def test_new_memory_may_be_written_once_what_used_it_before_has_happened():
    events = itertools.count()
    arena = Arena(2, CPU, lambda: next(events))
    assert list(acquire(arena, 2).ready) == [0]
    arena.grow(2)
    assert list(acquire(arena, 2).ready) == [1]
    assert arena.nbytes == 4


def test_users_of_any_dtype_share_bytes_and_keep_their_views():
    arena = new_arena(8)
    floats = arena.place_at(arena.hold(8), "two floats", 2, torch.float32)
    views = floats.views_for("pair", lambda memory: [memory[:1], memory[1:]])
    floats.storage.fill_(1.0)
    arena.release(floats.extent)
    halves = arena.place_at(arena.hold(8), "four halves", 4, torch.bfloat16)
    assert halves.storage.view(torch.float32).tolist() == [1.0, 1.0]
    arena.release(halves.extent)
    again = arena.place_at(arena.hold(8), "two floats", 2, torch.float32)
    assert again is floats and again.views_for("pair", list) is views


def test_a_place_cannot_be_given_back_twice():
    arena = new_arena()
    place = acquire(arena, 2)
    arena.release(place.extent)
    with pytest.raises(RuntimeError, match="twice"):
        arena.release(place.extent)


def test_views_of_a_place_are_seen_whoever_views_its_neighbours():
    arena = new_arena()
    place, other = acquire(arena, 3), acquire(arena, 3)
    place.views_for("own", lambda memory: [memory[:1], memory[1:]])
    view = other.storage[1:2]
    assert not place.is_viewed(patiently=False) and other.is_viewed(patiently=False)
    del view
    assert not other.is_viewed(patiently=False)


def test_memory_that_is_viewed_is_left_to_its_views_and_the_places_stay_the_same():
    arena = new_arena(6)
    place, other = acquire(arena, 3), acquire(arena, 3)
    place.storage.fill_(1)
    other.storage.fill_(2)
    view = place.storage[:]
    arena.abandon(place)
    arena.release(place.extent)
    again = acquire(arena, 3)
    again.storage.fill_(3)
    assert again.extent == place.extent and arena.nbytes == 6
    assert view.tolist() == [1, 1, 1] and other.storage.tolist() == [2, 2, 2]


def test_a_place_outside_takes_its_part_of_the_arena_but_none_of_its_memory():
    arena = new_arena(3)
    apart = acquire(arena, 3, is_outside=True)
    apart.storage.fill_(1)
    view = apart.storage[:]
    assert acquire(arena, 1) is None
    arena.release(apart.extent)
    acquire(arena, 3).storage.fill_(2)
    assert view.tolist() == [1, 1, 1]
