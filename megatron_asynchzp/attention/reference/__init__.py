# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Block mode without kernels, in plain torch on any device: readable next to the paper, slow."""
