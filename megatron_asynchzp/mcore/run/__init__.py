# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a run is, resolved once: the user's choices with what Megatron's settings say, the model
that the planner makes of them, and the check that all ranks have the same.
"""
