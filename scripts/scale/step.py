# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Computes a step with the planner's model of latency."""

from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import Attention, Batch, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.program import GRAD_SYNC, PARAM_SYNC
from megatron_asynchzp.sharding.topology import ShardSizes
from scripts.scale.costs import Cost


def _llama(hidden: int, ffn: int, heads: int, layers: int) -> Model:
    layer = Layer(Attention(heads, 8, hidden // heads), Mlp(ffn, is_gated=True))
    return Model(hidden, 128256, (layer,) * layers, is_tied=False)


MODELS = {
    "8b": _llama(4096, 14336, 32, 32),
    "70b": _llama(8192, 28672, 64, 80),
    "405b": _llama(16384, 53248, 128, 126),
}
_BATCH = Batch(1, 8192, 1)


def compute_step(model: Model, ranks: int, sizes: ShardSizes) -> list[Cost]:
    cluster = load_cluster("h100").with_ranks(ranks)
    costing = Costing(model, Plan(sizes, Parallel(), _BATCH), cluster)
    kinds = GRAD_SYNC, PARAM_SYNC
    of_units = costing.communication(0)
    latency_s = sum(each.latency_s for unit in of_units for kind in kinds for each in unit[kind])
    return [
        Cost("step", "a step on H100", "s", costing.step().step_s, False),
        Cost("step", "its latency between G, O and P", "s", latency_s, False),
    ]
