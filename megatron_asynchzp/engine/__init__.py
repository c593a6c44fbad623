# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The sharded engine, which needs torch alone: layouts, collectives, steps, states at rest."""
