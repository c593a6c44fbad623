# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the order in which a model chunk uses its units in a step and completes their gradients."""

from collections.abc import Sequence

from megatron_asynchzp.engine.zero.unit import HZPUnit


class UseOrder:
    """The orders of this step, and of the last one that had a micro-batch.

    [Note: no micro-batch] A rank whose group has no micro-batch in a step submits what crosses
    groups in the order of its last step that had one.
    """

    def __init__(self, units: Sequence[HZPUnit]):
        self._units = list(units)
        # Units in the order of their first use in a forward, those included that are never
        # gathered.
        self._used: dict[HZPUnit, None] = {}
        self.last_used: list[HZPUnit] = []  # of the last step that had a forward
        # Trained units in the order in which the last micro-batch completed their gradients.
        self._completed: list[HZPUnit] = []
        # Those of the last step that had a backward; None before the first one.
        self.last_completed: list[HZPUnit] | None = None
        # Whether a backward of this step has reduced gradients.
        self.had_backward = False

    def begin_step(self) -> None:
        self._used.clear()
        self._completed, self.had_backward = [], False

    def note_use(self, unit: HZPUnit) -> None:
        self._used.setdefault(unit)

    def note_completed(self, unit: HZPUnit) -> None:
        """Note that no later micro-batch of this step changes the gradients of `unit`."""
        self._completed.append(unit)

    def record_completed(self) -> None:
        self.last_completed = self._completed

    def record_used(self) -> None:
        self.last_used = list(self._used or self.last_used)

    @property
    def units_in_order(self) -> list[HZPUnit]:
        """All units: as this training step first used them, or the last one, and then the rest."""
        return list(dict.fromkeys([*(self._used or self.last_used), *self._units]))
