# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where all ranks of a node divide the model itself, the dense sharding group, that of the experts,
or both are of one rank: a run is that of stock Megatron on as many ranks."""

from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS, UNTIED, flags_of
from tests.mcore.test_muon_runs import DUPLICATED, MUON
from tests.support.parity import Variant, assert_equal_runs, compare
from tests.support.world import on_ranks

SHARED_EXPERT = ("--moe-shared-expert-intermediate-size", "64")


def layout(tp: int, pp: int, ep: int, expert_tp: int) -> tuple[str, ...]:
    """The flags of a mixture of experts that is divided like this."""
    sizes = {
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "expert-model-parallel-size": ep,
        "expert-tensor-parallel-size": expert_tp,
    }
    sequence = ["--sequence-parallel"] if tp > 1 else []
    return (*MIXTURE_OF_EXPERTS, *UNTIED, *flags_of(sizes), "--num-layers", "4", *sequence)


def test_muon_updates_the_experts_of_a_model_whose_two_groups_are_both_of_one_rank():
    flags = (*MUON, *DUPLICATED, *layout(tp=2, pp=1, ep=2, expert_tp=1), *SHARED_EXPERT)
    case = Variant("muon, a shared expert", (*flags, "--num-layers", "1"), model_ranks=2)
    assert_equal_runs(on_ranks(compare, 2, [(case, [(1, 1, 1)])], 3)[0])
