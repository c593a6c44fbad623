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
        "moments-updated-twice",
        "a preview works on copies of the optimizer's states",
        "zero/early_update.py",
        "copy: _copied(by_param[one]) for",
        "copy: by_param[one] for",
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
    Mutant(
        "nearly-1-taken-for-1",
        "only a factor of exactly 1 leaves what was sent",
        "mcore/optimizer.py",
        "return limit > 0.0 and limit / (grad_norm + 1.0e-6) < 1.0",
        "return limit > 0.0 and limit / (grad_norm + 1.0e-6) < 0.999999",
        "tests/mcore/test_early_update.py::"
        "test_a_norm_just_above_the_limit_is_clipped_and_just_below_it_is_not",
    ),
    Mutant(
        "sent-while-a-late-reader-computes",
        "a shard that was sent early is as it was for whatever uses it before the update",
        "sharding/decisions.py",
        "        self.use_shard(unit)\n        self._spans[unit] = extent",
        "        self._spans[unit] = extent",
        _AGAIN,
    ),
    Mutant(
        "states-written-while-a-preview-reads",
        "the optimizer waits for what reads its states",
        "zero/gathers.py",
        "        for sync in self._syncs.values():\n            sync.wait()",
        "        for unit, sync in self._syncs.items():\n"
        "            unit in self._sent or sync.wait()",
        _RACES,
    ),
    Mutant(
        "outdated-preview-stands",
        "a gradient that comes after a unit was sent counts",
        "zero/gathers.py",
        "done = self._sent.keys() - self._outdated if is_as_sent else ()",
        "done = list(self._sent) if is_as_sent else ()",
        _ENGINE + "test_a_gradient_that_comes_after_a_unit_was_sent_counts",
    ),
    Mutant(
        "skipped-step-keeps-what-was-sent",
        "a step that is left out leaves nothing of what was sent",
        "sharding/decisions.py",
        "        sent, self._sent = self._sent, {}\n        for unit in sent:",
        "        sent, self._sent = self._sent, {}\n        for unit in ():",
        _BITS,
    ),
    Mutant(
        "written-gradients-are-not-seen",
        "gradients that a loop writes count",
        "sharded_model.py",
        "return not (is_written or is_other or is_hooked)",
        "return not (is_other or is_hooked)",
        _LOOPS,
    ),
    Mutant(
        "changed-settings-are-not-seen",
        "a learning rate that changes before the update counts",
        "zero/early_update.py",
        "is_same = before.groups == _Settings.of(self._optimizer).groups",
        "is_same = True",
        _LOOPS,
    ),
    Mutant(
        "scaled-gradients-in-a-preview",
        "a preview takes the loss scale out of the gradients",
        "zero/early_update.py",
        "if (inverse := self._inverse_scale()) is not None:",
        "if (inverse := None) is not None:",
        "tests/mcore/test_early_update.py::test_fp16_has_the_bits_of_late_updates",
    ),
]
