# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapter leave the interpreter as they found it. Multi-rank bodies are module-level
functions given to tests.support.world.on_ranks, so `pytest tests/mcore` and
`torchrun --nproc-per-node 4 -m pytest tests/mcore` run the same files.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _without_platform_afterwards() -> Iterator[None]:
    """Under torchrun a body runs in pytest's own process and may leave the CPU platform there."""
    from megatron_asynchzp import cpu_platform

    yield
    cpu_platform.uninstall()
