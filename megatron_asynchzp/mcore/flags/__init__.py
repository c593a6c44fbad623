# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Flags, rules on Megatron's settings and checks; the engine and the patches are unknown here."""
