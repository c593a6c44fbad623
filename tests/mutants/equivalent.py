# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Generated mutants that no test can notice, each with the reason."""

EQUIVALENT: dict[str, str] = {}
