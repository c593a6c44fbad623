# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, resolved once from the user's choices and Megatron's settings."""
