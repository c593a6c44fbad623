# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A dry run of stock Megatron: the bytes at rest of its own buffers and of its own optimizer."""

import pytest

from megatron_asynchzp.commands.stages import dry_run_of_flags
from scripts.testbed.megatron_flags import flags_of
from tests.support import real_units

# fmt: off
_MODEL = ["--mock-data", *flags_of({
    "num-layers": 2, "hidden-size": 128, "num-attention-heads": 4, "seq-length": 128,
    "max-position-embeddings": 128, "vocab-size": 511, "tokenizer-type": "NullTokenizer",
    "micro-batch-size": 1, "global-batch-size": 8,
})]
_ROUNDED = ["--use-distributed-optimizer", "--use-precision-aware-optimizer"]
_MOMENTS = ["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
# fmt: on


@pytest.mark.parametrize("flags", [
    [], ["--bf16"], ["--bf16", "--grad-reduce-in-bf16"], ["--fp16"],
    ["--fp16", "--accumulate-allreduce-grads-in-fp32"], ["--bf16", *_ROUNDED],
    ["--bf16", *_ROUNDED, "--main-grads-dtype", "bf16"],
], ids=" ".join)  # fmt: skip
def test_gradients_have_the_dtype_of_the_buffers_that_megatron_would_make(flags):
    from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers

    found = dry_run_of_flags((*_MODEL, *flags), 8, 8)
    args = found.args
    for index, chunks, _ in real_units.stages(args):
        params = [param for chunk in chunks for param in chunk.parameters()]
        in_fp32 = args.accumulate_allreduce_grads_in_fp32  # what Megatron gives its DDP
        buffers = group_params_for_buffers(params, in_fp32)
        nbytes = sum(
            key.grad_dtype.itemsize * sum(param.numel() for param in group)
            for key, (group, *_) in buffers.items()
        )
        assert found.stages[index].formula["main_grad"] == nbytes


@pytest.mark.parametrize("flags, per_element", [
    (["--bf16"], 4 + 8), ([], 8), (["--bf16", *_ROUNDED, *_MOMENTS], (4 + 4) / 8),
    (["--bf16", "--use-distributed-optimizer"], (4 + 8) / 8),
    (["--bf16", *_ROUNDED, "--main-params-dtype", "fp16"], (2 + 8) / 8),
    (["--bf16", "--optimizer", "sgd"], 4 + 4),
    (["--bf16", "--optimizer", "sgd", "--sgd-momentum", "0"], 4),
])  # fmt: skip
def test_main_parameters_and_moments_have_the_dtypes_of_the_flags(flags, per_element):
    (held,) = dry_run_of_flags((*_MODEL, *flags), 8, 8).stages
    states = held.formula["main_param"] + held.formula["optimizer_moments"]
    assert states == pytest.approx(per_element * held.numel["dense"])
