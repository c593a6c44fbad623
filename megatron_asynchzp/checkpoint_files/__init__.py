# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the files of checkpoints: whether one is complete and intact, which one a run loads, who may
write.
"""
