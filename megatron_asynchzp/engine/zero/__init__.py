# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The sharded engine: units and the step of a model chunk. Knows no Megatron."""
