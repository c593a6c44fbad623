# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which units a model chunk has sent before their update."""

from collections.abc import Hashable


class EarlyUnits[Unit: Hashable]:
    """Units that were sent early, and whether a step may send more.

    Until the update their parameter shards already hold the values of the next step.
    """

    def __init__(self) -> None:
        # In the order in which they were sent.
        self.units: dict[Unit, None] = {}
        # False for the rest of the run as soon as a unit is used between its early send and the
        # update.
        self.is_allowed = True

    def pop_all(self) -> list[Unit]:
        units = list(self.units)
        self.units.clear()
        return units
