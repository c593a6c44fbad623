# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to break the code, one for each law and mechanism, each with the smallest fast test that
notices."""

from tests.mutants.catalogue import communication, engine, megatron, sharding, sub_samples
from tests.mutants.catalogue.mutant import Mutant

MUTANTS: list[Mutant] = [
    *sharding.MUTANTS,
    *communication.MUTANTS,
    *engine.MUTANTS,
    *megatron.MUTANTS,
    *sub_samples.MUTANTS,
]
