# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the fork server of tests/support/ranks.py imports once, so that no rank pays for it."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.training  # noqa: F401
