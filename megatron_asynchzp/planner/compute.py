# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Time that a rank computes with a unit, and of the collectives of model parallelism meanwhile."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_asynchzp.planner import model as shapes
from megatron_asynchzp.planner.activations import Recompute
from megatron_asynchzp.planner.cluster import Cluster, Cost, Ring
from megatron_asynchzp.planner.model import Batch, Model, Parallel, Unit
from megatron_asynchzp.planner.traffic import BETWEEN, INSIDE

_COMPUTED_AGAIN = ("layer", "experts", "adapters", "mtp")


@dataclass(frozen=True)
class Sent:
    """Collectives of model parallelism."""

    name: str  # of their kind, for users
    link: str
    waited_s: float  # computation waits for them
    busy_s: float  # `link` is in use

    @classmethod
    def of(cls, name: str, ring: Ring, cost: Cost, times: int = 1) -> "Sent":
        link = BETWEEN if ring.crosses_nodes else INSIDE
        return cls(name, link, times * cost.alone_s, times * cost.busy_s)


@dataclass(frozen=True)
class ComputeTimes:
    """Times of a micro-batch's computation, in seconds."""

    model: Model
    parallel: Parallel
    batch: Batch
    recompute: Recompute
    cluster: Cluster

    def of_unit(self, unit: Unit) -> tuple[float, float]:
        """Return the slowest rank's forward and backward seconds, with what it sends meanwhile."""
        cluster, recompute = self.cluster, self.recompute
        launch_s = 1e-6 * cluster.device.launch_us * (unit.kind != "root")
        forward_s = (self._busy_s(unit, unit.flops) + launch_s) * cluster.slowest
        sent_s, again = sum(sent.waited_s for sent in self.sent_of(unit)), 0.0
        if unit.kind in _COMPUTED_AGAIN:
            if recompute.granularity == "full":
                again = self._share_computed_again * (forward_s + sent_s)
            elif recompute.has("core_attn"):
                again = self._busy_s(unit, self._core_attention_flops(unit)) * cluster.slowest
        busy_s = self._busy_s(unit, self.backward_flops(unit), 2) + 2 * launch_s
        backward_s = busy_s * cluster.slowest
        return forward_s + sent_s, backward_s + sent_s + again

    def backward_flops(self, unit: Unit) -> float:
        """Return the FLOPs of a micro-batch's backward, without recomputation."""
        # Frozen layers compute gradients of inputs alone; the scores of attention have no weights.
        if unit.is_trained:
            return 2 * unit.flops
        return unit.flops + self._core_attention_flops(unit)

    def _busy_s(self, unit: Unit, flops: float, passes: int = 1) -> float:
        device, core = self.cluster.device, 0.0
        if device.attention_tflops:
            core = passes * self._core_attention_flops(unit)
        return (flops - core) / device.flops_per_s + core / device.attention_flops_per_s

    @cached_property
    def _share_computed_again(self) -> float:
        """Share of the layers that backward computes again, with full recomputation."""
        recompute, parallel = self.recompute, self.parallel
        if recompute.method == "uniform":
            return 1.0
        chunk = len(self.model.layers) / (parallel.pp * parallel.virtual)
        return min(1.0, recompute.num_layers / chunk)

    def _core_attention_flops(self, unit: Unit) -> float:
        if unit.source is None or unit.kind == "experts":
            return 0.0
        batch, layer = self.batch, unit.source
        # Only the pairs of tokens grow with the square of the sequence.
        args = (layer, self.model, self.parallel)
        twice = replace(batch, size=1, seq_length=2 * batch.seq_length)
        once = replace(batch, size=2)
        pairs = shapes.mixer_flops(*args, twice) - shapes.mixer_flops(*args, once)
        return pairs * batch.size / 2

    def sent_of(self, unit: Unit) -> list[Sent]:
        """Return the collectives of model parallelism in a forward, and a backward, of `unit`."""
        # Only those of context parallelism overlap with computation.
        model, cluster = self.model, self.cluster
        parallel, layer = self.parallel, unit.source
        hidden_nbytes = self.batch.tokens / parallel.cp * model.hidden * model.itemsize
        per_node = cluster.ranks_per_domain
        collectives: list[Sent] = []
        if layer is not None and unit.kind == "experts" and isinstance(layer.mlp, shapes.Experts):
            ring = Ring.of_axis(parallel.ep, parallel.experts_tp, per_node)
            cost = ring.exchange(layer.mlp.topk * hidden_nbytes / parallel.tp, cluster)
            collectives.append(Sent.of("the experts' all-to-all", ring, cost, 2))
        elif unit.kind in ("layer", "mtp") and layer is not None:
            parts = (layer.mixer is not None) + isinstance(layer.mlp, shapes.Mlp)
            ring = Ring.of_axis(parallel.tp, 1, per_node)
            cost = ring.turn(hidden_nbytes, cluster)
            collectives.append(Sent.of("tensor-parallel collectives", ring, cost, 2 * parts))
            ring = Ring.of_axis(parallel.cp, parallel.tp, per_node)
            cost = ring.turn(self._key_value_nbytes(layer), cluster)
            keys = Sent.of("context-parallel keys and values", ring, cost)
            hidden_s = self._busy_s(unit, unit.flops)
            collectives.append(replace(keys, waited_s=max(0.0, keys.waited_s - hidden_s)))
        return collectives

    def sent_in(self, units: Iterable[Unit]) -> dict[tuple[str, str], tuple[float, float]]:
        """Return the seconds of waiting, and of each link's use, in a micro-batch of `units`."""
        total = defaultdict[tuple[str, str], tuple[float, float]](lambda: (0.0, 0.0))
        for unit in units:
            is_again = self.recompute.granularity == "full" and unit.kind in _COMPUTED_AGAIN
            passes = 2 + is_again * self._share_computed_again
            for sent in self.sent_of(unit):
                waited, busy = total[sent.name, sent.link]
                more = passes * sent.waited_s, passes * sent.busy_s
                total[sent.name, sent.link] = waited + more[0], busy + more[1]
        return dict(total)

    def _key_value_nbytes(self, layer: shapes.Layer) -> float:
        match layer.mixer:
            case shapes.Attention(num_groups=groups, head_dim=width):
                elements = 2 * groups * width
            case shapes.LatentAttention() as part:
                elements = part.num_heads * (part.qk_dim + part.rope_dim + part.v_dim)
            case _:
                elements = 0
        tokens = self.batch.tokens
        return tokens * elements * self.model.itemsize / self.parallel.tp

    @cached_property
    def send_s(self) -> float:
        parallel, cluster = self.parallel, self.cluster
        parts = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
        nbytes = self.batch.tokens / parts * self.model.hidden * self.model.itemsize
        distance = cluster.num_ranks // parallel.pp
        link = cluster.between if distance >= cluster.ranks_per_domain else cluster.inside
        return nbytes / link.reached(nbytes) + 1e-6 * link.latency_us
