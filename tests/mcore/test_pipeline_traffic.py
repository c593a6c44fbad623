# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a pipeline costs in collectives, as docs/paper.md states it."""

from scripts.bench.count_pipeline import measure


def test_micro_batches_of_a_pipeline_share_neither_a_gather_nor_a_reduction():
    layers, micro_batches = 4, 8
    counts = {line["unit"]: line for line in measure(layers, micro_batches)}
    middle = [counts[f"decoder.layers.{layer}"] for layer in range(1, layers - 1)]
    assert [one["gathers"] for one in middle] == [2 * micro_batches] * len(middle)
    assert [one["reductions"] for one in middle] == [micro_batches] * len(middle)
