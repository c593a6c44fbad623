# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of Megatron that we replace, each replacement next to its record.

Replacements only call the adapter; importing this folder changes nothing.
"""
