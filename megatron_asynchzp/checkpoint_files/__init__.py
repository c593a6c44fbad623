# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What lies on disk of a checkpoint: whether it is complete, whether it is intact, which one to
load, who may write. Knows file systems; must not know models, nor Megatron.
"""
