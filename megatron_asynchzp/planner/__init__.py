# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a run needs, before it runs: pure functions on frozen dataclasses of plain numbers."""
