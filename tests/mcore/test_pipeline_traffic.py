# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a pipeline costs in collectives, as docs/paper.md states it."""

from scripts.bench.count_pipeline import measure


def test_micro_batches_share_no_reduction_and_a_middle_layer_s_gathers_only_near_a_turn():
    layers, micro_batches = 6, 4
    lines = measure(layers, micro_batches)
    assert {line["reductions"] for line in lines} == {micro_batches}
    counts = {(line["stage"], line["unit"]): line["gathers"] for line in lines}
    for stage in range(2):
        of_layers = [counts[stage, f"decoder.layers.{layer}"] for layer in range(layers)]
        # Two slots: at either end two layers stay gathered at the turn.
        assert of_layers[2:-2] == [2 * micro_batches] * (layers - 4), of_layers
        assert max(of_layers[:2] + of_layers[-2:]) < 2 * micro_batches, of_layers
