# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Every module of these tests ends without the CPU platform."""

from tests.support.replaced_platform import without_platform_afterwards

__all__ = ["without_platform_afterwards"]
