# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: matrices that are whole on one rank."""

from tests.mutants.catalogue.mutant import Mutant

_WHOLE = "tests/zero/test_whole_matrices.py::test_"
_MUON = "tests/mcore/test_muon.py::test_"

MUTANTS = [
    Mutant(
        "a-matrix-has-no-owner",
        "every matrix is whole on exactly one owner of each copy of the state",
        "zero/whole_matrices.py",
        "if owner == rank]",
        "if owner == topology.rank]",
        f"{_WHOLE}each_copy_of_the_state_has_one_owner_per_matrix_and_none_owns_much_at_once",
    ),
    Mutant(
        "pieces-return-to-the-neighbour",
        "what an owner sends back goes where it came from",
        "zero/whole_matrices.py",
        "for rank in range(hop.axis.axis.size) for part in parts)",
        "for rank in reversed(range(hop.axis.axis.size)) for part in parts)",
        f"{_WHOLE}owners_get_the_whole_matrix_and_every_piece_returns_to_its_place",
    ),
    Mutant(
        "the-inner-axis-hops-first",
        "pieces that meet on a rank lie next to each other in the matrix",
        "zero/whole_matrices.py",
        "for axis_group in reversed(axes):",
        "for axis_group in axes:",
        f"{_WHOLE}owners_get_the_whole_matrix_and_every_piece_returns_to_its_place",
    ),
    Mutant(
        "a-round-without-limit",
        "no rank owns more than the largest matrix at once",
        "zero/whole_matrices.py",
        "if used and used + numel > limit:",
        "if False:",
        f"{_WHOLE}rounds_hold_everything_once_and_of_each_owner_at_most_the_limit",
    ),
    Mutant(
        "work-in-any-order",
        "owners are balanced by cost",
        "zero/whole_matrices.py",
        "for index in sorted(range(len(costs)), key=lambda index: -costs[index]):",
        "for index in range(len(costs)):",
        f"{_WHOLE}the_dearest_pieces_of_work_are_given_out_first",
    ),
    Mutant(
        "the-momentum-is-lost",
        "Muon on shards takes the steps of Muon on whole matrices",
        "mcore/muon.py",
        "return momentum.clone()",
        "return momentum",
        f"{_MUON}twenty_steps_on_shards_of_every_nesting_are_those_of_muon_on_whole_matrices[False]",
    ),
    Mutant(
        "queries-with-keys",
        "queries, keys and values are orthogonalised apart",
        "mcore/muon.py",
        "marked.is_qkv, marked.qkv_split_shapes = True, qkv_split_shapes",
        "marked.is_qkv, marked.qkv_split_shapes = False, qkv_split_shapes",
        f"{_MUON}queries_keys_and_values_are_orthogonalised_apart",
    ),
    Mutant(
        "norms-have-muon",
        "norms, biases and embeddings have Adam",
        "mcore/muon.py",
        'return _EMERGING_OPTIMIZERS["muon"].default_param_overrides',
        "return {}",
        f"{_MUON}embeddings_norms_biases_and_tensors_that_are_no_matrices_have_adam",
    ),
]
