# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tests that use the CPU platform leave the interpreter as they found it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def without_platform_afterwards() -> Iterator[None]:
    """Under torchrun a body runs in pytest's own process and may leave the CPU platform there."""
    from megatron_asynchzp import cpu_platform

    yield
    cpu_platform.uninstall()
