# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters that Megatron runs send before the norm is known."""

import zlib
from typing import Any

import torch

from scripts.testbed.megatron_runs import run_pretrain
from tests.mcore.test_parity import FP16_OVERFLOW
from tests.support.parity import Variant, size_flags
from tests.support.world import on_ranks


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
        for moment in ("exp_avg", "exp_avg_sq"):
            total = zlib.crc32(state[moment].numpy().tobytes(), total)
    return total


def run(flags: tuple[str, ...], early: str, iterations: int) -> tuple:
    """Losses, norms and a checksum of what is held, and how often a shard was rebuilt."""
    counts = []

    def look(chunks, optimizer) -> int:
        found = checksum(chunks, optimizer)
        counts.append(chunks[0].communication.driver.counts["param-sync"])
        return found

    argv = Variant("early", flags).argv(iterations)
    found = run_pretrain(
        [*argv, *size_flags((1, 2, 2)), "--asynchzp-early-update", early], inspect=look
    )
    return (found.losses, found.grad_norms, found.inspected), counts[0]


def clip_at(flags: tuple[str, ...], *factors: float) -> list[tuple]:
    """For each factor two steps whose limit is so many times the norm of the second, early and
    late, each with the number of times that shards were rebuilt."""
    (_, norms, _), _ = run((*flags, "--clip-grad", "1000"), "off", 2)
    limits = [(*flags, "--clip-grad", repr(factor * norms[-1])) for factor in factors]
    return [(run(limit, "on", 2), run(limit, "off", 2)) for limit in limits]


def test_a_norm_just_above_the_limit_is_clipped_and_just_below_it_is_not():
    """At a factor of 0.9999995 elements already differ."""
    lr = ("--lr", "1e-2", "--min-lr", "1e-2", "--lr-decay-style", "constant")
    for above, below in on_ranks(clip_at, 2, lr, 0.9999995, 1.0001):
        for (early, _), (late, _) in (above, below):
            assert early == late
        assert above[0][1] > below[0][1]


def compare_updates(flags: tuple[str, ...], iterations: int) -> tuple:
    return run(flags, "on", iterations), run(flags, "off", iterations)


def test_fp16_has_the_bits_of_late_updates():
    """With overflow in the first steps, which are left out."""
    flags = (*FP16_OVERFLOW, "--clip-grad", "1000")
    for (early, _), (late, _) in on_ranks(compare_updates, 2, flags, 8):
        assert early == late
