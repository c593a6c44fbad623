# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what Megatron's saving and loading of checkpoints needs to know of shards, and the guard
around both. What lies on disk is judged by `checkpoint_files/`.
"""
