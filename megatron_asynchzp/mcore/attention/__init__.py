# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""PASA as the core attention of Megatron's layers, on top of megatron_asynchzp.attention."""
