# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to break the code, one for each law and mechanism, each with the smallest fast test that
notices."""

from tests.mutants.catalogue import (
    adapters,
    communication,
    early_update,
    engine,
    launch_order,
    megatron,
    sharding,
)
from tests.mutants.catalogue.mutant import Mutant

MUTANTS: list[Mutant] = [
    *sharding.MUTANTS,
    *communication.MUTANTS,
    *engine.MUTANTS,
    *early_update.MUTANTS,
    *megatron.MUTANTS,
    *adapters.MUTANTS,
    *launch_order.MUTANTS,
]
