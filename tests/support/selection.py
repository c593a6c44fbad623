# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which cases of a table of tests run by default, and which with `--all` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_unless(is_fast: bool, *values: Any, id: str | None = None) -> Any:
    """One case for pytest.mark.parametrize."""
    return pytest.param(*values, marks=() if is_fast else pytest.mark.slow, id=id)


def some_and_rest(names: Iterable[str], fast: list[str]) -> list[Any]:
    """Two cases, each a list of names that one set of ranks runs: `fast`, and all others."""
    rest = [name for name in names if name not in fast]
    return [slow_unless(True, fast, id="some"), slow_unless(False, rest, id="rest")]
