# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which versions of torch, Megatron and Python the tests are run with, and how that is done."""
