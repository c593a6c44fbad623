# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of Megatron that we replace: each replacement stands beside its record. The
replacements only call the adapter; importing this folder changes nothing.
"""
