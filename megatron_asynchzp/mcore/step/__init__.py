# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What Megatron calls in each step: the data-parallel wrapper, the optimizer, what they report."""
