# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Our command-line flags, the flags of Megatron that we refuse or switch off, and the checks before
Megatron builds anything. The engine and the patches are unknown here.
"""
