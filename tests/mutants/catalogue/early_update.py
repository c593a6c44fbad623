# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: what is sent before the update, and when that may stand."""

from tests.mutants.catalogue.mutant import Mutant

_ENGINE = "tests/zero/test_early_update.py::"
_BITS = _ENGINE + "test_the_bits_are_those_of_an_update_after_the_norm_whatever_becomes_of_a_step"
_AGAIN = (
    _ENGINE + "test_a_model_that_is_used_again_after_its_last_micro_batch_is_no_longer_sent_early"
)
_READ = (
    "tests/test_changed_behind.py::"
    "test_until_the_step_the_optimizer_s_values_are_those_of_the_last_one"
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
        "preview-in-the-place-of-main-params",
        "main parameters are those of the last step until the next one",
        "zero/unit.py",
        "for part in (slice(own.start), slice(own.stop, None)):",
        "for part in (slice(None),):",
        _READ,
    ),
    Mutant(
        "what-differs-is-not-sent-again",
        "what the update did not make of a unit that was sent is sent again",
        "zero/step.py",
        "return [unit for unit in sent if unit not in differing]",
        "return sent",
        _BITS,
    ),
    Mutant(
        "written-parameters-are-not-seen",
        "values that are written after the step are refused at their next use",
        "zero/autograd.py",
        "                self.refuse_write(unit)\n",
        "",
        "tests/test_changed_behind.py::"
        "test_values_that_are_written_after_the_step_are_refused_at_their_next_use",
    ),
]
