# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which cases of a table of tests run by default, and which with `--all` only."""

from typing import Any

import pytest


def slow_unless(is_fast: bool, *values: Any, id: str | None = None) -> Any:
    """One case for pytest.mark.parametrize."""
    return pytest.param(*values, marks=() if is_fast else pytest.mark.slow, id=id)
