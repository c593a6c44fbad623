# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where every byte lives: pure arithmetic. No threads, no hooks, no process groups."""
