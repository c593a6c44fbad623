# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Says how far numbers of one run are from those of another.

Python's max and comparisons pass over NaN, which a broken run computes: here it is infinitely far
from everything.
"""

from collections.abc import Iterable, Sequence
from math import inf, isfinite


def largest(errors: Iterable[float]) -> float:
    """Infinite where one of them is not a number; 0 for none."""
    return max((error if isfinite(error) else inf for error in errors), default=0.0)


def worst_difference(ours: Sequence[float | None], others: Sequence[float | None]) -> float:
    """Return the largest relative difference of two series of equal length.

    It is infinite if only one of them has a number (not None), or if one is not finite. Raises
    ValueError if lengths differ.
    """
    return largest(_difference(*pair) for pair in zip(ours, others, strict=True))


def _difference(mine: float | None, other: float | None) -> float:
    if mine is None or other is None:
        return 0.0 if mine is other else inf
    return abs(mine - other) / max(abs(other), 1e-30)
