# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where all ranks of a node divide the model itself, the dense sharding group, that of the experts,
or both are of one rank: a run is that of stock Megatron on as many ranks."""

from itertools import product

import pytest

from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS, UNTIED, flags_of
from tests.mcore.test_muon_runs import DUPLICATED, MUON
from tests.support.parity import Sizes, Variant, assert_equal_runs, compare
from tests.support.world import on_ranks

SHARED_EXPERT = ("--moe-shared-expert-intermediate-size", "64")
OPTIMIZERS = {"adam": (), "muon": (*MUON, *DUPLICATED)}


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


def cases_of(ranks: int, optimizer: str) -> list[tuple[Variant, list[Sizes]]]:
    """Every layout on `ranks` ranks in which a sharding group is of one rank."""
    cases: list[tuple[Variant, list[Sizes]]] = []
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    for tp, pp, ep, expert_tp in product(divisors, repeat=4):
        dense, experts = ranks / (tp * pp), ranks / (ep * expert_tp * pp)
        if min(dense, experts) == 1 and dense.is_integer() and experts.is_integer():
            flags = (*OPTIMIZERS[optimizer], *layout(tp, pp, ep, expert_tp))
            name = f"{optimizer}, TP {tp}, PP {pp}, EP {ep}, expert TP {expert_tp}"
            size = int(dense)
            cases.append((Variant(name, flags, 4, tp * pp), [(1, size, size)]))
    return cases


def test_muon_updates_the_experts_of_a_model_whose_two_groups_are_both_of_one_rank():
    flags = (*MUON, *DUPLICATED, *layout(tp=2, pp=1, ep=2, expert_tp=1), *SHARED_EXPERT)
    case = Variant("muon, a shared expert", (*flags, "--num-layers", "1"), model_ranks=2)
    assert_equal_runs(on_ranks(compare, 2, [(case, [(1, 1, 1)])], 3)[0])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks, number", [(2, 6), (4, 18)])
def test_every_layout_with_a_group_of_one_rank_trains_as_stock(ranks, number, optimizer):
    cases = cases_of(ranks, optimizer)
    assert len(cases) == number
    assert_equal_runs(on_ranks(compare, ranks, cases, 10, timeout_s=1800)[0])
