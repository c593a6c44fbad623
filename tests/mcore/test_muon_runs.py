# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Whole runs with --optimizer muon: against one stock rank, against stock on as many ranks, saved
and resumed on other sizes.
"""

from functools import partial

import numpy as np
import pytest
import torch

from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS, UNTIED, size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.mcore.checkpoint.test_resuming import check_moves
from tests.mcore.test_parity import PIPELINE, TENSOR, TWO_EXPERT_RANKS
from tests.support.checkpoints import Job
from tests.support.engine import nested_sizes
from tests.support.parity import Variant, assert_equal_runs, compare
from tests.support.selection import slow_unless
from tests.support.world import on_ranks

# Newton-Schulz in fp32: rounding to bf16, Megatron's default, would hide what differs.
MUON = ("--optimizer", "muon", "--muon-fp32-matmul-prec", "high")
STEPS, TOLERANCE = 20, 1e-5
HEAD_DIM = 16
DUPLICATED = ("--muon-tp-mode", "duplicated")
DISTRIBUTED = ("--muon-tp-mode", "distributed")
QUERY_GROUPS = ("--swiglu", "--group-query-attention", "--num-query-groups", "2")


def params_of(chunks: list, _: object) -> dict[str, np.ndarray]:
    """Every parameter of this rank's model, whole. Tensors would end with the rank."""
    from megatron_asynchzp.mcore.step.whole_tensors import whole_params

    found = {}
    for chunk in chunks:
        is_sharded = hasattr(chunk, "runtime")
        named = whole_params(chunk.runtime) if is_sharded else chunk.named_parameters()
        found |= {n.replace("module.", ""): param.detach().clone().numpy() for n, param in named}
    return found


def train(flags: tuple[str, ...], all_sizes: list) -> list[dict[str, np.ndarray]]:
    """The parameters after STEPS, with each of the sizes; None stands for stock Megatron."""
    found = []
    for sizes in all_sizes:
        ours = [] if sizes is None else size_flags(sizes)
        argv = gpt_args(*MUON, *flags, "--train-iters", str(STEPS), *ours)
        found.append(run_pretrain(argv, inspect=params_of).inspected)
    return found


def without_key_biases(name: str, param: torch.Tensor) -> torch.Tensor:
    """The elements of a parameter that a run determines.

    A bias of the keys adds the same number to all scores of a query, which softmax ignores. So its
    gradient is 0 but for rounding, and Adam divides the rounding by its own size.
    """
    if not name.endswith("linear_qkv.bias"):
        return param
    return param.view(-1, 3, HEAD_DIM)[:, ::2]  # of each head the queries, keys and values


def assert_slices_of(params: dict, whole: dict, rank: int, case: object) -> None:
    """Whether each of `params` is the reference, or this tensor-parallel rank's part of it."""
    assert set(params) == set(whole)
    for name, param in params.items():
        expected = torch.from_numpy(whole[name])
        for dim, (mine, full) in enumerate(zip(param.shape, expected.shape, strict=True)):
            if mine != full:
                expected = expected.chunk(full // mine, dim)[rank % (full // mine)]
        torch.testing.assert_close(
            without_key_biases(name, torch.from_numpy(param)),
            without_key_biases(name, expected),
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=partial("{}, sizes {}, rank {}: {}".format, name, case, rank),
        )


@pytest.mark.slow
@pytest.mark.parametrize("embedding", [(), tuple(UNTIED)], ids=["tied", "untied"])
def test_every_nesting_of_4_ranks_ends_with_the_parameters_of_one_stock_rank(embedding):
    ((whole,),) = on_ranks(train, 1, embedding, [None], timeout_s=600)
    sizes = nested_sizes(4)
    for rank, found in enumerate(on_ranks(train, 4, embedding, sizes, timeout_s=1800)):
        for one, params in zip(sizes, found, strict=True):
            assert_slices_of(params, whole, rank, one)


NESTEROV = ("--muon-nesterov", "--muon-no-split-qkv")
MANY = [(1, 2, 4), (2, 1, 2), (4, 4, 4)]
FAST = "grouped queries, untied"
CASES = {
    FAST: [(Variant("muon", (*MUON, *QUERY_GROUPS, *UNTIED), 3), MANY[:1])],
    "one rank": [
        (Variant("muon", MUON), MANY),
        (Variant("muon, Nesterov, whole queries", (*MUON, *NESTEROV)), [(2, 4, 4)]),
    ],
    "two ranks": [
        (Variant("muon, tensor parallel", (*MUON, *TENSOR), 3, 2), nested_sizes(2)),
        (Variant("muon, duplicated", (*MUON, *TENSOR, *DUPLICATED), 1, 2), [(1, 2, 2)]),
        (Variant("muon, distributed", (*MUON, *TENSOR, *DISTRIBUTED), 1, 2), [(1, 2, 2)]),
        (Variant("muon, pipeline", (*MUON, *PIPELINE, *UNTIED), 3, 2), [(2, 1, 2)]),
    ],
    "experts": [
        (Variant("muon, experts", (*MUON, *MIXTURE_OF_EXPERTS)), MANY[:1]),
        (Variant("muon, experts on 2 ranks", (*MUON, *TWO_EXPERT_RANKS)), MANY),
    ],
}


@pytest.mark.parametrize(
    "name, steps", [(FAST, 3), *(slow_unless(False, name, 10) for name in CASES)]
)
def test_a_run_is_that_of_stock_muon_on_as_many_ranks(name, steps):
    assert_equal_runs(on_ranks(compare, 4, CASES[name], steps, timeout_s=1800)[0])


MOVES = {
    Job((2, 1, 4), MUON): [
        Job((1, 2, 2), MUON),
        Job((1, 1, 1), (*MUON, *PIPELINE)),
        Job(None, MUON),
    ],
    Job((2, 2, 4), (*MUON, *TWO_EXPERT_RANKS)): [Job((4, 1, 4), (*MUON, *MIXTURE_OF_EXPERTS))],
    Job(None, (*MUON, *UNTIED)): [Job((2, 1, 4), (*MUON, *UNTIED))],
}


@pytest.mark.slow
def test_a_run_resumes_on_other_sizes_and_from_and_to_stock(tmp_path):
    check_moves(MOVES, 4, tmp_path, 1e-6)
