# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of Megatron that we replace, next to their records; importing changes nothing."""
