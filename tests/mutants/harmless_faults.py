# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of the device path that break nothing, each with the reason: what is left out there is
covered by another order, or is for a CPU alone."""

from tests.mutants.device_faults import Fault

HARMLESS: dict[Fault, str] = {}
