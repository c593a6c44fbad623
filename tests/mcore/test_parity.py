# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A run with --use-asynchzp prints the losses and gradient norms of stock Megatron DDP."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from megatron.core import package_info

from megatron_asynchzp.versions import Version
from scripts.testbed.megatron_flags import FULL_RECOMPUTE, MIXTURE_OF_EXPERTS, UNTIED
from tests.support.engine import nested_sizes
from tests.support.parity import KEEP, Variant, assert_equal_runs, compare
from tests.support.shrunk_models import SHRUNK_MODELS, SHRUNK_MODELS_IN_PARALLEL
from tests.support.world import on_ranks

# At the fp32 learning rate of 3e-3 rounding noise grows so fast in bf16 that stock DDP and stock
# distributed optimizer differ by 2e-3 after 16 steps, in losses that are both right.
BF16 = ("--bf16", "--lr", "1e-3", "--min-lr", "1e-4")
# The scale is large enough for the first 5 steps to overflow and drops fast enough for the rest.
FP16_OVERFLOW = (
    *("--fp16", "--accumulate-allreduce-grads-in-fp32"),
    *("--initial-loss-scale", "4194304", "--hysteresis", "1"),
    *("--lr", "1e-3", "--min-lr", "1e-4"),
)
TWO_EXPERT_RANKS = (*MIXTURE_OF_EXPERTS, "--expert-model-parallel-size", "2")
TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")
# At the learning rate of the others, 3e-3, two scores of one token on 8 ranks are one bit apart in
# step 6: the order of additions decides to which expert it goes, and all that follows.
# fmt: off
SHARED_EXPERT = (
    *MIXTURE_OF_EXPERTS, "--moe-shared-expert-intermediate-size", "64",
    "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01",
    "--lr", "1e-3", "--min-lr", "1e-4",
)
# fmt: on
PIPELINE_OF_4 = ("--pipeline-model-parallel-size", "4", "--num-layers", "4")
CONTEXT = ("--context-parallel-size", "2", "--use-pasa-attention")
PREDICTION = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
# On 8 ranks two stock runs, one with the distributed optimizer, differ by 5e-6 in the norm of steps
# 8 to 10 at the learning rate of the others, 3e-3.
# fmt: off
INTERLEAVED = (
    *PIPELINE, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1",
    "--lr", "1e-3", "--min-lr", "1e-4",
)
# fmt: on
EVALUATION = ("--eval-iters", "2", "--eval-interval", "2")
SELECTIVE_RECOMPUTE = ("--recompute-granularity", "selective")

FP32 = Variant("fp32")
ACCUMULATED = Variant("fp32, 3 micro-batches", samples_per_rank=3)
BF16_ACCUMULATED = Variant("bf16, 3 micro-batches", BF16, 3, is_noisy=True)
FP16 = Variant("fp16 with overflow", FP16_OVERFLOW, is_noisy=True, overflows=True)
# The one case of fp32 whose differences grow: its learning rate is large, and nothing scales it.
SGD = Variant("sgd", ("--optimizer", "sgd", "--lr", "0.1"), is_noisy=True)
ONE_RANK_MODELS = [
    FP32,
    ACCUMULATED,
    Variant("bf16", BF16, is_noisy=True),
    BF16_ACCUMULATED,
    FP16,
    Variant("untied", tuple(UNTIED)),
    Variant("no clipping", ("--clip-grad", "0.0")),
    Variant("clipping hard, 3 micro-batches", ("--clip-grad", "0.05"), 3),
    Variant("full recompute", tuple(FULL_RECOMPUTE)),
    Variant("full recompute of both layers at once", (*FULL_RECOMPUTE[:-1], "2")),
    Variant("selective recompute", SELECTIVE_RECOMPUTE),
    Variant("evaluation", EVALUATION),
    Variant("loss per token, 3 micro-batches", ("--calculate-per-token-loss",), 3),
    Variant("learning rate of the output layer", (*UNTIED, "--decoupled-lr", "1e-3")),
    SGD,
    Variant("ranks that start differently", ("--data-parallel-random-init",)),
    Variant("experts", tuple(MIXTURE_OF_EXPERTS)),
    Variant("experts, one shared, auxiliary loss", SHARED_EXPERT, 3),
    Variant("experts on 2 ranks", TWO_EXPERT_RANKS),
    Variant(
        "experts, their layer recomputed",
        (*SHARED_EXPERT, *SELECTIVE_RECOMPUTE, "--recompute-modules", "moe"),
        3,
    ),
    Variant("2 more tokens predicted, untied", (*PREDICTION, *UNTIED, "--mtp-num-layers", "2")),
    Variant(
        "one more token predicted, experts on 2 ranks, recomputed",
        (*PREDICTION, *TWO_EXPERT_RANKS, *FULL_RECOMPUTE),
        3,
    ),
    # A router turns the last bit of a score into another expert.
    Variant(
        "experts on 2 ranks, bf16",
        (*TWO_EXPERT_RANKS, *BF16, "--lr", "3e-4", "--min-lr", "3e-5"),
        is_noisy=True,
    ),
]
TWO_RANK_MODELS = [
    Variant("tensor parallel", TENSOR, model_ranks=2),
    # Norms of queries and keys: Megatron sums their gradients over tensor-parallel ranks.
    Variant("tensor parallel, norms of q and k", (*TENSOR, "--qk-layernorm"), 3, 2),
    Variant("tensor parallel, untied", (*TENSOR, *UNTIED), 3, model_ranks=2),
    Variant("pipeline, 3 micro-batches", PIPELINE, 3, 2),
    Variant("interleaved pipeline", INTERLEAVED, 4, 2),
    Variant("pipeline, untied, recomputed", (*PIPELINE, *UNTIED, *FULL_RECOMPUTE), 3, 2),
    Variant("pipeline, bf16", (*PIPELINE, *BF16), 3, 2, is_noisy=True),
    Variant("one more token predicted, tensor parallel", (*PREDICTION, *TENSOR), 3, 2),
    Variant("one more token predicted, pipeline", (*PREDICTION, *PIPELINE), 3, 2),
    Variant("one more token predicted, pipeline, untied", (*PREDICTION, *PIPELINE, *UNTIED), 3, 2),
    Variant("experts on 2 ranks, pipeline", (*TWO_EXPERT_RANKS, *PIPELINE), 3, 2),
]
_KEPT = [
    (Variant("3 micro-batches", (), 3), 1),
    (Variant("8 micro-batches", (), 8), 1),
    (Variant("pipeline", PIPELINE, 4), 2),
    (Variant("interleaved pipeline", INTERLEAVED, 4), 2),
    (Variant("pipeline of 4, recomputed", (*PIPELINE_OF_4, *FULL_RECOMPUTE), 4), 4),
    (Variant("pipeline, tensor parallel", (*PIPELINE, *TENSOR), 4), 4),
    (Variant("pipeline, experts on 2 ranks", (*PIPELINE, *TWO_EXPERT_RANKS), 4), 2),
    (Variant("pipeline, context parallel", (*PIPELINE, *CONTEXT), 4), 4),
]
KEPT = [
    replace(one, name=f"kept: {one.name}", model_ranks=ranks, ours=KEEP) for one, ranks in _KEPT
]
# What the fast tests run, each kind once, and what does not disturb each other in one run; the slow
# ones run every variant for 20 steps.
FAST_DENSE = (
    BF16_ACCUMULATED,
    Variant(
        "clipping hard, full recompute, evaluation, learning rate of the output layer, ranks that "
        "start differently",
        (
            *("--clip-grad", "0.05", *FULL_RECOMPUTE, *EVALUATION),
            *(*UNTIED, "--decoupled-lr", "1e-3", "--data-parallel-random-init"),
        ),
        3,
    ),
    # Its scale takes 5 steps to come down, and then it has to learn something.
    replace(FP16, flags=(*FP16.flags, "--train-iters", "10")),
)
FAST_EXPERTS = (
    Variant(
        "one more token predicted, experts on 2 ranks, one shared, auxiliary loss, recomputed",
        (*PREDICTION, *SHARED_EXPERT, *TWO_EXPERT_RANKS[-2:], *FULL_RECOMPUTE),
        3,
    ),
)
FAST_TWO_RANK_MODELS = ("tensor parallel, norms of q and k", "experts on 2 ranks, pipeline")
EIGHT = [(2, 4, 8), (1, 2, 8), (2, 2, 4), (8, 8, 8), (1, 1, 8)]


# One evaluation within, and a step after it.
FEW_STEPS = 4


def run(cases, world_size: int, iterations: int = FEW_STEPS, timeout_s: float = 600) -> None:
    cases = [(variant, sizes) for variant, sizes in cases if is_trained_by_stock(variant)]
    assert_equal_runs(on_ranks(compare, world_size, cases, iterations, timeout_s=timeout_s)[0])


def is_trained_by_stock(variant: Variant) -> bool:
    """megatron-core 0.18 recomputes no further predicted tokens (its own TypeError, padding_mask),
    and in a pipeline it logs no losses of theirs."""
    lacks = {"--recompute-granularity", "--pipeline-model-parallel-size"} & set(variant.flags)
    is_predicted = "--mtp-num-layers" in variant.flags
    is_018 = Version.of(package_info.__version__) < Version(0, 19)
    return not (is_018 and is_predicted and lacks)


def run_all(cases, world_size: int) -> None:
    run(cases, world_size, 20, 1800)


def named(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    by_name = {variant.name: variant for variant in variants}
    return [by_name[name] for name in names]


def in_turn(variants: Sequence[Variant], chains: Sequence) -> list[tuple]:
    """Each variant with one of the sizes."""
    return [(variant, [chains[i % len(chains)]]) for i, variant in enumerate(variants)]


def test_every_precision_recompute_and_loss_on_2_ranks_is_stock_ddp():
    run(in_turn(FAST_DENSE, [(2, 1, 2), (1, 2, 2), (2, 2, 2)]), 2)


def test_experts_on_4_ranks_are_stock_ddp():
    # Mamba layers, and a router balanced by biases, are in no other fast test.
    variants = [*FAST_EXPERTS, *named(SHRUNK_MODELS, ["Nemotron-3 Nano"])]
    run(in_turn(variants, [(2, 4, 4), (1, 2, 4)]), 4, FEW_STEPS - 1)


def test_tensor_and_pipeline_parallel_models_on_4_ranks_are_stock_ddp():
    kept = [one for one in KEPT if one.name == "kept: interleaved pipeline"]
    variants = [*named(TWO_RANK_MODELS, FAST_TWO_RANK_MODELS), *kept]
    run(in_turn(variants, [(2, 2, 2), (1, 2, 2)]), 4, FEW_STEPS - 1)


@pytest.mark.slow  # on the engine it is fast, in tests/zero/test_engine_parity.py
def test_three_different_sizes_on_8_ranks_are_stock_ddp():
    run([(FP32, EIGHT[:1])], 8)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ONE_RANK_MODELS, ids=lambda v: v.name)
def test_every_variant_with_every_nesting_on_4_ranks_is_stock_ddp(variant):
    run_all([(variant, nested_sizes(4))], 4)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [BF16, FP16_OVERFLOW], ids=["bf16", "fp16"])
def test_without_clipping_losses_of_16_bit_runs_are_those_of_stock_in_every_bit(flags):
    """fp32 adds a few 16-bit gradients without rounding: only their norm depends on the order."""
    cases = [(Variant("no clipping", (*flags, "--clip-grad", "0")), [(2, 2, 4), (4, 4, 4)])]
    results = on_ranks(compare, 4, cases, 20, timeout_s=600)[0]
    assert_equal_runs(results)
    assert [result.loss_error for result in results] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ONE_RANK_MODELS, ids=lambda v: v.name)
def test_every_variant_on_8_ranks_is_stock_ddp(variant):
    run_all([(variant, EIGHT)], 8)


@pytest.mark.slow
@pytest.mark.parametrize("variant", TWO_RANK_MODELS, ids=lambda v: v.name)
def test_every_two_rank_model_with_every_nesting_on_8_ranks_is_stock_ddp(variant):
    run_all([(variant, nested_sizes(4))], 8)


@pytest.mark.slow
def test_what_is_kept_between_micro_batches_of_every_layout_is_stock_ddp():
    run_all([(one, [(2, 2, 2)]) for one in KEPT], 8)


@pytest.mark.slow
def test_shrunk_models_on_8_ranks_are_stock_ddp():
    run_all([(model, [(1, 2, 4), (2, 2, 4), (2, 4, 8)]) for model in SHRUNK_MODELS], 8)


@pytest.mark.slow
def test_shrunk_models_with_tensor_sequence_and_pipeline_parallelism_are_stock_ddp():
    run_all([(model, [(1, 2, 4), (2, 2, 4)]) for model in SHRUNK_MODELS_IN_PARALLEL], 8)
