# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: what is sent before the update, and when that may stand."""

from tests.mutants.catalogue.mutant import Mutant

_ENGINE = "tests/zero/test_early_update.py::"
_BITS = _ENGINE + "test_the_bits_are_those_of_an_update_after_the_norm_whatever_becomes_of_a_step"
_AGAIN = (
    _ENGINE + "test_a_model_that_is_used_again_after_its_last_micro_batch_is_no_longer_sent_early"
)
_RACES = (
    "tests/zero/test_happens_before.py::test_every_two_conflicting_accesses_of_streams_are_ordered"
)
_LOOPS = (
    "tests/test_early_update.py::"
    "test_whatever_a_loop_does_before_the_update_the_bits_are_those_without_early_updates"
)
_MEGATRON = (
    "tests/mcore/test_schedules.py::test_the_three_schedules_are_identical_over_3_steps_of_megatron"
)

MUTANTS = [
    Mutant(
        "commit-of-the-sent-copy",
        "main parameters are what the update makes of them, not what was sent",
        "zero/unit.py",
        "return and_then(last, lambda: own.copy_(copy))",
        "return last",
        _BITS,
    ),
    Mutant(
        "clipped-step-is-not-sent-again",
        "what was sent for a step that is clipped is sent again",
        "zero/early_update.py",
        "agree(is_factor_1 and is_same)",
        "agree(is_same)",
        _BITS,
    ),
]
