# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: memory in flight."""

from tests.mutants.catalogue.mutant import Mutant

PIECES = "tests/zero/test_grad_pieces.py::test_"
_ARENA = "tests/comm/test_arena.py::test_"
IN_FLIGHT = "tests/sharding/test_in_flight.py::test_"

MUTANTS = [
    Mutant(
        "readers-of-overlapping-places",
        "law 5: a writer waits for the readers of every byte it writes",
        "comm/arena.py",
        "if _overlap(used, span):",
        "if used == span:",
        f"{_ARENA}the_next_writer_waits_for_the_last_user_of_every_byte_and_for_no_one_before_it",
    ),
    Mutant(
        "places-across-their-neighbours",
        "law 5: two units never hold the same byte",
        "sharding/in_flight.py",
        "                start = taken[1]\n",
        "",
        f"{_ARENA}places_never_overlap_lie_within_and_depend_on_the_order_of_calls_alone",
    ),
    Mutant(
        "one-end-of-the-arena",
        "what is free stays in one piece between the two ends",
        "sharding/in_flight.py",
        "return stop - nbytes if from_top else start",
        "return start",
        f"{_ARENA}users_in_turn_at_opposite_ends_leave_room_for_the_next_whatever_their_sizes",
    ),
    Mutant(
        "views-of-neighbours-count",
        "law 5: views of one place are told from those of others",
        "comm/arena.py",
        "return torch.from_dlpack(part.view(dtype))",
        "return part.view(dtype)",
        f"{_ARENA}views_of_a_place_are_seen_whoever_views_its_neighbours",
    ),
    Mutant(
        "a-place-apart-is-in-the-arena",
        "law 5: memory that is viewed is not rewritten by another unit",
        "comm/arena.py",
        "        if is_apart:\n",
        "        if False:\n",
        f"{_ARENA}a_place_apart_takes_its_part_of_the_arena_but_none_of_its_memory",
    ),
    Mutant(
        "a-piece-of-a-neighbour",
        "a piece holds the same part of every rank's shard",
        "sharding/pieces.py",
        "offset = number * part.numel - here.start",
        "offset = number * part.numel - number * shard",
        "tests/sharding/test_pieces.py::test_a_reduce_scatter_of_every_piece_is_one_of_the_whole",
    ),
    Mutant(
        "pieces-at-the-start-of-the-shard",
        "the sum of a piece goes to its part of the gradient shard",
        "zero/reductions.py",
        "unit.main_grad.storage[slice(*piece.part)]",
        "unit.main_grad.storage[: piece.part.numel]",
        f"{PIECES}gradients_in_pieces_are_those_in_one_piece_in_every_bit",
    ),
    Mutant(
        "gradients-gone-before-the-last-piece",
        "gradients stay until their last piece is packed",
        "zero/reductions.py",
        "{} if len(pieces) == 1 else collected.grads",
        "{}",
        f"{PIECES}gradients_in_pieces_are_those_in_one_piece_in_every_bit",
    ),
    Mutant(
        "added-in-the-models-dtype",
        "another gradient of a parameter is added in fp32",
        "zero/unit.py",
        "before.float().add_(grad)",
        "before + grad",
        f"{PIECES}another_gradient_of_the_same_parameter_is_added_in_fp32",
    ),
    Mutant(
        "a-budget-that-is-not-kept",
        "memory in flight stays within its budget",
        "sharding/in_flight.py",
        "        grads = min(grads, aligned(budget - params))\n",
        "",
        f"{IN_FLIGHT}every_budget_from_the_least_to_the_default_is_kept",
    ),
    Mutant(
        "memory-per-size",
        "layers that are never needed together share memory",
        "sharding/in_flight.py",
        "                break\n",
        "                continue\n",
        f"{IN_FLIGHT}equal_layers_need_two_and_an_embedding_shares_its_memory_with_the_output_layer",
    ),
]
