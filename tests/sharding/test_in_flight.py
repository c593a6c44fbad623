# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Memory in flight by formula: what layers need, what a budget leaves, and when it is refused."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_asynchzp.engine.sharding.in_flight import (
    UnitInFlight,
    least_in_flight,
    memory_in_flight,
    reduction_nbytes,
)
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.errors import ConfigurationError

KIB = 1024


def unit(layer: str, params: int, grads: int = 0, pieces: int = 1) -> UnitInFlight:
    return UnitInFlight(layer, params * 128, grads * 128, params * 128, pieces)


def model(*sizes: int) -> list[UnitInFlight]:
    return [unit(f"layer {index}", size, 2 * size) for index, size in enumerate(sizes)]


def in_flight(units, **more) -> tuple[int, int]:
    memory = memory_in_flight(units, **more)
    return memory.params // 128, memory.grads // 128


def test_equal_layers_need_two_and_an_embedding_shares_its_memory_with_the_output_layer():
    assert in_flight(model(1, 1, 1, 1)) == (2, 4)
    assert in_flight(model(4, 1, 1, 1, 1, 4)) == (6, 12)  # not 4 + 4 + 1 + 1
    assert in_flight(model(4, 1, 1, 1, 1, 4), num_ahead=0) == (5, 12)
    assert in_flight(model(1, 1, 1, 1), num_ahead=2) == (3, 4)


def test_units_of_one_layer_are_needed_together_and_those_around_all_layers_always():
    layers = [unit(f"{index}", size) for index in range(3) for size in (1, 10)]
    assert in_flight([*layers, unit("", 5)]) == (2 * 11 + 5, 0)
    assert least_in_flight([*layers, unit("", 5)]) == (128 * 16, 0)


def test_pieces_of_gradients_take_two_slots_however_large_their_units():
    large = [unit("one", 100, 8, pieces=13), unit("two", 100, 8, pieces=13), unit("three", 1, 2)]
    assert in_flight(large)[1] == 16
    # While the pieces of one layer are reduced those of the layer before it come.
    assert memory_in_flight(large).own_grads == 128 * 200


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 60 * 128)
)
def test_a_budget_is_kept_or_refused_with_the_number_and_more_never_gives_less(
    sizes, ahead, budget
):
    units = model(*sizes)
    try:
        memory = memory_in_flight(units, ahead, budget=budget)
    except ConfigurationError as error:
        assert sum(least_in_flight(units)) > budget
        assert f"{sum(least_in_flight(units)) / 2**30:.4g} GiB" in str(error)
        assert "\n" not in str(error)
        return
    layer, piece = least_in_flight(units)
    assert memory.params + memory.grads <= budget
    assert memory.params >= layer and memory.grads >= piece
    more, default = (
        memory_in_flight(units, ahead, budget=2 * budget),
        memory_in_flight(units, ahead),
    )
    assert memory.params <= more.params <= default.params
    assert memory.params + memory.grads <= more.params + more.grads


def test_a_unit_that_is_never_gathered_or_reduced_needs_nothing_in_flight():
    alone = ShardTopology(4, 0, ShardSizes(1, 1, 4))
    sharded = ShardTopology(4, 0, ShardSizes(2, 4, 4))
    assert UnitInFlight.of("", 4096, 2, True, alone, KIB) == UnitInFlight("", 0, 0, 8192, 1)
    assert UnitInFlight.of("", 4096, 2, False, sharded, KIB) == UnitInFlight("", 8192, 0, 0, 1)
    pieces = UnitInFlight.of("", 4096, 2, True, sharded, 4 * KIB)
    assert pieces == UnitInFlight("", 8192, 4 * KIB + 2 * KIB + KIB, 8192, 4)


def test_what_travels_in_bf16_needs_a_copy_beside_the_sums():
    assert reduction_nbytes(64, [2, 4]) == 4 * (64 + 32 + 8)
    assert reduction_nbytes(64, [2, 4], wire_nbytes=2) == 4 * (64 + 32 + 8) + 2 * 64
    assert reduction_nbytes(64, [], wire_nbytes=2) == 4 * 64
