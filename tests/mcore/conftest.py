# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapter. Multi-rank bodies are module-level functions given to
tests.support.world.on_ranks, so `pytest tests/mcore` and
`torchrun --nproc-per-node 4 -m pytest tests/mcore` run the same files.
"""

from tests.support.replaced_platform import without_platform_afterwards

__all__ = ["without_platform_afterwards"]
