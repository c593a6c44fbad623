# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""--softmax-type learnable on tensor-parallel ranks, each of which has the offsets of its heads."""

import pytest

from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from scripts.testbed.tiny_gpt import seed_parameters
from tests.support.selection import slow_unless
from tests.support.world import on_ranks

FLAGS = ("--softmax-type", "learnable", "--train-iters", "3", "--global-batch-size", "4")


def with_offsets(chunks: list) -> list:
    """Megatron draws the offsets by rank: let a rank have those of its heads."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    for chunk in seed_parameters(chunks):
        for name, param in chunk.named_parameters():
            if name.endswith("softmax_offset"):
                for place in range(param.numel()):
                    param.data[place] = 0.1 * (rank * param.numel() + place)
    return chunks


def numbers_of(*flags: str) -> list[list]:
    run = run_pretrain(gpt_args(*FLAGS, "--log-params-norm", *flags), prepare=with_offsets)
    return [run.losses, run.grad_norms, run.params_norms]


@pytest.mark.parametrize(
    "tensor, ranks, sizes",
    [
        slow_unless(True, 2, 2, (1, 1, 1)),
        slow_unless(False, 2, 4, (1, 2, 2)),
        slow_unless(False, 4, 4, (1, 1, 1)),
    ],
)
def test_norms_have_the_offsets_of_all_heads_as_on_one_rank(tensor, ranks, sizes):
    (whole,) = on_ranks(numbers_of, 1)
    flags = ("--tensor-model-parallel-size", str(tensor), *size_flags(sizes))
    for found in on_ranks(numbers_of, ranks, *flags):
        for ours, expected in zip(found, whole, strict=True):
            assert ours == pytest.approx(expected, rel=1e-6)
