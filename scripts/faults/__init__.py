# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of nodes and links at random moments of training: `python -m scripts.faults`."""
