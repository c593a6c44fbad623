# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Shards in Megatron's checkpoints, and guards around saving and loading them."""
