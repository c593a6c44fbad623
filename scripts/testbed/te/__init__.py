# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine without a GPU: its own Python, over a stand-in for its extension."""
