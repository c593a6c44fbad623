# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchrony changes no bit of a Megatron run: losses, gradient norms and parameters of the three
schedules are identical, with units sent before the norm is known and without; and nothing grows."""

import zlib
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_asynchzp.engine.schedule import SCHEDULES
from scripts.testbed.megatron_flags import FULL_RECOMPUTE
from scripts.testbed.megatron_runs import run_pretrain
from tests.mcore.test_parity import (
    BF16,
    FP16_OVERFLOW,
    INTERLEAVED,
    PIPELINE,
    TENSOR,
    TWO_EXPERT_RANKS,
)
from tests.support.live_memory import live_nbytes
from tests.support.parity import Sizes, Variant, size_flags
from tests.support.world import on_ranks

ALL = [
    (Variant("interleaved pipeline, recomputed", (*INTERLEAVED, *FULL_RECOMPUTE), 4, 2), (2, 2, 2)),
    (Variant("experts on 2 ranks, bf16", (*TWO_EXPERT_RANKS, *BF16), 2), (2, 4, 4)),
    (Variant("fp32", samples_per_rank=1), (2, 2, 4)),
    (Variant("fp32, 3 micro-batches", samples_per_rank=3), (2, 4, 4)),
    (Variant("bf16", BF16), (4, 2, 4)),
    (Variant("bf16, 3 micro-batches", BF16, 3), (2, 2, 4)),
    (Variant("recomputed, 3 micro-batches", tuple(FULL_RECOMPUTE), 3), (4, 4, 4)),
    (Variant("pipeline, 3 micro-batches", PIPELINE, 3, 2), (2, 2, 2)),
    (Variant("interleaved pipeline, bf16", (*INTERLEAVED, *BF16), 4, 2), (2, 1, 2)),
    (Variant("experts on 2 ranks, 3 micro-batches", TWO_EXPERT_RANKS, 3), (2, 2, 4)),
    (Variant("fp16 with overflow", FP16_OVERFLOW), (2, 2, 4)),
    (Variant("tensor parallel", TENSOR, 2, 2), (1, 2, 2)),
    (Variant("never clipped", ("--clip-grad", "1000")), (2, 2, 4)),
    (Variant("always clipped, bf16", (*BF16, "--clip-grad", "0.01")), (1, 2, 4)),
    (Variant("sgd", ("--optimizer", "sgd", "--lr", "0.1")), (2, 2, 4)),
]
WAYS = {"inline": (1, "off"), "main-thread": (2, "on"), "threaded": (2, "on")}


def checksum(chunks: list, optimizer: Any) -> int:
    """Of this rank's parameter shards, gathered from the optimizer's, and of Adam's moments."""
    total = 0
    for chunk in chunks:
        chunk.runtime.settle()
        for unit in chunk.units:
            for state in (unit.model_param, unit.main_param):
                raw = state.storage.contiguous().view(torch.uint8).numpy()
                total = zlib.crc32(raw.tobytes(), total)
    for state in optimizer.state.values():
        for moment in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if moment in state:
                total = zlib.crc32(state[moment].numpy().tobytes(), total)
    return total


def run_schedules(cases: list[tuple[Variant, Sizes]], iterations: int) -> list[tuple]:
    """Per case what each schedule printed, and its checksum."""
    output = []
    for variant, sizes in cases:
        argv = [*variant.argv(iterations), *size_flags(sizes)]
        for kind in SCHEDULES:
            depth, early = WAYS[kind]
            flags = ["--asynchzp-schedule", kind, "--asynchzp-prefetch-depth", str(depth)]
            flags += ["--asynchzp-early-update", early]
            run = run_pretrain([*argv, *flags], inspect=checksum)
            numbers = (run.losses, run.grad_norms, [s.num_zeros for s in run.steps], run.inspected)
            output.append((variant.name, kind, numbers))
    return output


def assert_identical(of_ranks: list[list[tuple]], iterations: int) -> None:
    for output in of_ranks:
        inline = {name: numbers for name, kind, numbers in output if kind == "inline"}
        for name, kind, numbers in output:
            assert len(numbers[0]) == iterations
            assert numbers == inline[name], (name, kind)


@pytest.mark.slow  # on the engine it is fast, in tests/zero/test_schedules.py
@pytest.mark.parametrize("world_size", [4, 8])
def test_the_three_schedules_are_identical_over_50_steps_of_megatron(world_size):
    assert_identical(on_ranks(run_schedules, world_size, ALL, 50, timeout_s=1800), 50)


def memory_by_step(steps: int) -> tuple[list[int], list[int]]:
    """Live bytes and bytes in flight at the start of every step."""
    from megatron_asynchzp.engine.zero.autograd import HZPRuntime

    live, in_flight = [], []
    zero_grads = HZPRuntime.zero_grads

    def counted(self: HZPRuntime, number: int | None = None) -> None:
        zero_grads(self, number)
        live.append(live_nbytes())
        in_flight.append(sum(self.in_flight_nbytes().values()))

    variant = Variant("bf16, 3 micro-batches", BF16, 3)
    with mock.patch.object(HZPRuntime, "zero_grads", counted):
        argv = [*variant.argv(steps), *size_flags((2, 2, 4)), "--asynchzp-prefetch-depth", "3"]
        run_pretrain(argv)
    return live, in_flight


@pytest.mark.slow
def test_after_the_first_steps_memory_does_not_grow_over_100():
    for live, in_flight in on_ranks(memory_by_step, 4, 100):
        assert len(live) == 100 and len(set(in_flight)) == 1
        # Batches that the data loader holds come and go; they are a few KiB.
        assert max(live[8:]) <= max(live[2:8]) + 16384
