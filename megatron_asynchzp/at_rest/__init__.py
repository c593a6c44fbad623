# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What happens between two steps: sleep, and whole parameters that leave. Knows no Megatron."""
