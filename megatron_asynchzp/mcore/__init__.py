# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter to Megatron-core 0.19: what a training run replaces and adds there."""
