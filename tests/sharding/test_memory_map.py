# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a memory are apart, lie at their end, and remember who used them last."""

import random

import pytest

from megatron_asynchzp.engine.sharding.memory_map import Extent, MemoryMap


@pytest.mark.parametrize("seed", range(4))
def test_what_is_held_is_apart_and_whoever_writes_there_next_waits_for_its_last_user(seed):
    chance = random.Random(seed)
    for _ in range(50):
        regions = [chance.randint(1, 70) for _ in range(chance.randint(1, 3))]
        turns = [
            (chance.randint(0, 40), chance.random() < 0.5, chance.randint(0, 5)) for _ in range(12)
        ]
        check(regions, turns)


def check(regions: list[int], turns: list[tuple[int, bool, int]]) -> None:
    """Hold and release in turns. regions: their bytes; a turn: bytes, from the top, what ends."""
    memory = MemoryMap[str]()
    for nbytes in regions:
        memory.grow(nbytes)
    last_user = dict.fromkeys(range(sum(regions)), "")  # of each byte
    held: list[Extent] = []
    for number, (nbytes, from_top, released) in enumerate(turns):
        free = last_user.keys() - {byte for extent in held for byte in range(*extent)}
        extent = memory.hold(nbytes + 1, from_top)
        if extent is None:  # no free part of a region is as long
            ends = [sum(regions[:index]) for index in range(len(regions) + 1)]
            for start in range(sum(regions) - nbytes):
                part = set(range(start, start + nbytes + 1))
                is_cut = any(start < end <= start + nbytes for end in ends)
                assert is_cut or not part <= free
        else:
            assert extent[1] - extent[0] == nbytes + 1 and set(range(*extent)) <= free
            users = {last_user[byte] for byte in range(*extent)} - {""}
            assert set(memory.pop_last_users(extent)) == users
            assert memory.pop_last_users(extent) == []
            last_user |= dict.fromkeys(range(*extent), "")
            held.append(extent)
        if released < len(held):
            extent, user = held.pop(released), f"user {number}" if released % 2 else None
            memory.release(extent, user)
            if user is not None:
                last_user |= dict.fromkeys(range(*extent), user)
            with pytest.raises(RuntimeError, match="released twice"):
                memory.release(extent)
        assert memory.num_held == len(held)
