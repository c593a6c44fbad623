# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Frameworks on megatron.core, without megatron.training: stock and AsyncHZP in the same loop."""
