# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: adapters in a frozen model."""

from tests.mutants.catalogue.mutant import Mutant

MUTANTS = [
    Mutant(
        "frozen-in-adapters-checkpoint",
        "a checkpoint of what is trained has nothing else",
        "sharded_checkpoint.py",
        "(self._trained if only_trained else self.parts)",
        "self.parts",
        (
            "tests/test_sharded_model.py::"
            "test_a_checkpoint_of_what_is_trained_leaves_the_rest_as_it_is"
        ),
    ),
    Mutant(
        "fully-trained-model-starts-anew",
        "a tensor may be missing in a base only where the model is frozen around it",
        "mcore/checkpoint/frozen.py",
        "if FROZEN_KEY in chunk:",
        "if True:",
        ("tests/mcore/checkpoint/test_frozen.py::test_nothing_may_be_missing_where_all_is_trained"),
    ),
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
    Mutant(
        "merged-weight-rounded-twice",
        "a merged weight is rounded once",
        "hf/adapters.py",
        "(out @ into)",
        "(out @ into).to(weight.dtype).float()",
        ("tests/hf/test_adapters.py::test_the_merged_weight_is_the_sum_in_fp32_rounded_once"),
    ),
    Mutant(
        "planned-states-of-frozen-units",
        "the planner counts no gradient and no optimizer state of what is frozen",
        "planner/costs.py",
        'total[state] += nbytes if unit.is_trained or state == "model_param" else 0.0',
        "total[state] += nbytes",
        ("tests/planner/test_adapters.py::test_what_is_frozen_has_parameters_and_no_other_state"),
    ),
    Mutant(
        "planned-reductions-of-frozen-units",
        "the planner orders no reduction of what is frozen",
        "planner/costs.py",
        "            is_trained and sizes.grad > 1,\n            is_trained,\n",
        "            sizes.grad > 1,\n            True,\n",
        (
            "tests/planner/test_adapters.py::"
            "test_operations_other_than_gathers_are_those_of_adapters_alone"
        ),
    ),
]
