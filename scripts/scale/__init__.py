# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a world of many ranks costs a rank, rank 0, the store and the files."""
