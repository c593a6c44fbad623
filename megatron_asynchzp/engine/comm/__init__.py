# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How bytes move between ranks. Knows groups and flat tensors, not parameters."""
