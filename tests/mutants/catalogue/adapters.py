# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: adapters in a frozen model."""

from tests.mutants.catalogue.mutant import Mutant

MUTANTS = [
    Mutant(
        "base-lacks-a-frozen-tensor",
        "a base has every frozen tensor",
        "mcore/checkpoint/frozen.py",
        "new |= _keep(chunk.get(SHARDS_KEY, {}), there)",
        "new |= _keep(chunk[FROZEN_KEY] | chunk.get(SHARDS_KEY, {}), ())",
        (
            "tests/mcore/checkpoint/test_frozen.py::"
            "test_only_what_a_base_lacks_of_the_trained_tensors_starts_anew"
        ),
    ),
    Mutant(
        "adapters-scaled-by-alpha",
        "an adapter is merged times alpha / rank",
        "hf/adapters.py",
        "self._alpha / len(into) * (out @ into)",
        "self._alpha * (out @ into)",
        ("tests/hf/test_adapters.py::test_the_merged_weight_is_the_sum_in_fp32_rounded_once"),
    ),
]
