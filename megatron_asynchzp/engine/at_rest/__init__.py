# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Operations between two steps: sleep, and whole parameters for a caller. Knows no Megatron."""
