# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns checkpoint files: which are complete and intact, which to load, and who may write."""
