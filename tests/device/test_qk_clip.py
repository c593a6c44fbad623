# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's runs with --qk-clip, whose scores Transformer Engine has: as stock, to the bit."""

import pytest

from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import TENSOR_PARALLEL, size_flags
from tests.device.test_transformer_engine import BASE, Run, equal, train

pytestmark = pytest.mark.slow

# fmt: off
CLIP = ["--qk-clip", "--qk-clip-threshold", "0.5", "--qk-clip-alpha", "0.3"]
LATENT = ["--multi-latent-attention", "--position-embedding-type", "rope", "--qk-head-dim", "16",
          "--qk-pos-emb-head-dim", "16", "--v-head-dim", "16", "--kv-lora-rank", "16"]
LAYOUTS = {
    "shared keys": (2, ["--group-query-attention", "--num-query-groups", "2"]),
    "latent": (2, LATENT),
    "latent, tensor": (4, [*LATENT, *TENSOR_PARALLEL]),
}
OURS = [
    [*size_flags((2, 2, 2)), "--asynchzp-keep-params-gb", "0.01"],
    [*size_flags((1, 1, 2)), "--asynchzp-early-update", "on"],
    [*size_flags((1, 2, 2)), "--optimizer-cpu-offload", "--optimizer-offload-fraction", "1.0"],
]
# fmt: on


def train_each(line: list[str]) -> list[Run]:
    """Stock without it, stock, and each of OURS."""
    clipped = [*line, *CLIP]
    return [train(line), train(clipped), *(train([*clipped, *ours]) for ours in OURS)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_stock_that_clips_whole_weights(te_worlds: DeviceWorlds, name: str):
    ranks, more = LAYOUTS[name]
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if ranks == 4 else {}
    line = [*BASE, "--bf16", *more]
    without, stock, *ours = te_worlds.run(train_each, ranks, line, timeout_s=590, env=env)[0]
    assert stock.steps[0][0] == without.steps[0][0] and stock.steps[1][0] != without.steps[1][0]
    for run in ours:
        assert equal(run.steps, stock.steps)
