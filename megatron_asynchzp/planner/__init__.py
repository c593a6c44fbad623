# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts memory and time of a run, in pure functions on frozen dataclasses of numbers."""
