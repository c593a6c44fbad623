# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""AsyncHZP for Megatron-LM. Importing this package loads neither megatron nor triton."""

__version__ = "0.1.0"
