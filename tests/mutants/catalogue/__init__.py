# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to break the code, by subject, each with the smallest fast test that notices."""

from tests.mutants.catalogue import (
    attention,
    communication,
    cpu_platform,
    daily_use,
    devices,
    dry_run,
    engine,
    experts,
    in_flight,
    matrices,
    megatron,
    planner,
    sharding,
    staying,
)
from tests.mutants.catalogue.mutant import Mutant

_SUBJECTS = (
    experts,
    staying,
    sharding,
    communication,
    engine,
    in_flight,
    devices,
    megatron,
    attention,
    cpu_platform,
    matrices,
    dry_run,
    daily_use,
    planner,
)

MUTANTS: list[Mutant] = [mutant for subject in _SUBJECTS for mutant in subject.MUTANTS]
