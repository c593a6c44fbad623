# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a cluster can do: its ranks, devices and links."""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner.goodput import Failures

MIB, GIB, GB = 2**20, 2**30, 1e9
# Of NCCL's model of PAT (src/graph/tuning.cc): its steps overlap, each rank adds to the latency,
# and it reaches a part of the ring's speed.
_PAT_OVERLAP, _PAT_RANK_US, _PAT_SPEED = 3.5, 2.8, 0.75


@dataclass(frozen=True)
class Device:
    """One accelerator.

    tflops: dense peak in the model's dtype.
    efficiency: the part of it that a layer reaches, in (0, 1].
    attention_tflops: what fused attention reaches, as it was measured; 0: as the rest of a layer.
    memory_gib: of the device.
    reserved_gib: what the driver, Megatron's communicators and the allocator keep from a model.
    communicator_mib: what each of the engine's communicators keeps beside that (HCCL's buffers).
    memory_gb_s: speed of its memory.
    launch_us: what a unit's forward takes beside its FLOPs, its backward twice that (the host's
        time, norms, activations).
    step_us: what the host does between an optimizer and the first unit of the next step (logging,
        reading data), while parameter shards are rebuilt.
    """

    tflops: float
    memory_gib: float
    efficiency: float = 0.5
    memory_gb_s: float = 2000.0
    reserved_gib: float = 4.0
    communicator_mib: float = 0.0
    attention_tflops: float = 0.0
    launch_us: float = 0.0
    step_us: float = 0.0

    @property
    def flops_per_s(self) -> float:
        """FLOPs per second that a layer reaches."""
        return 1e12 * self.tflops * self.efficiency

    @property
    def attention_flops_per_s(self) -> float:
        """FLOPs per second that attention's scores and their product with the values reach."""
        return 1e12 * self.attention_tflops or self.flops_per_s

    @property
    def usable_nbytes(self) -> float:
        """Bytes of memory for a model."""
        return GIB * (self.memory_gib - self.reserved_gib)


@dataclass(frozen=True)
class Link:
    """Link between the ranks of a node, or between the nodes.

    gb_s: 1e9 bytes per second, each way, of one rank's link inside a node or of one network card
        between nodes.
    cards: of a node, for the link between nodes (ranks share them where they are fewer).
    shared: whether all ranks of a node share the link inside it.
    latency_us: of one message from a rank to the next.
    start_us: of one collective, whatever its size.
    trees: whether collectives of few bytes may go along a tree, between nodes, as NCCL's do.
    efficiency: the part of gb_s that is reached, as (bytes of one message, part) pairs in ascending
        order, interpolated over the logarithm of the bytes.
    """

    gb_s: float
    latency_us: float = 0.0
    start_us: float = 0.0
    cards: int = 1
    shared: bool = False
    trees: bool = False
    efficiency: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def reached(self, message_nbytes: float) -> float:
        """Bytes per second of one link with messages of this size."""
        points = self.efficiency
        place = bisect_left(points, (message_nbytes,))
        if place == 0:
            part = points[0][1]
        elif place == len(points):
            part = points[-1][1]
        else:
            (low, before), (high, after) = points[place - 1], points[place]
            share = math.log(message_nbytes / low) / math.log(high / low)
            part = before + share * (after - before)
        return GB * self.gb_s * part


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    inside, between: the links within a domain and from domain to domain.
    nodes_per_domain: how many nodes the links inside join: 18 of 4 GB200s share NVLink.
    runs_ahead: whether the host issues work ahead of the device, as with CUDA.
    imbalance: by how much of its length the slowest rank's computation of a micro-batch is longer
        than the mean (variable sequence lengths, stragglers), for `Cluster.slowest`.
    source: where the figures come from.
    failures: None where the file states none.
    """

    name: str
    nodes: int
    ranks_per_node: int
    device: Device
    inside: Link
    between: Link
    runs_ahead: bool = True
    imbalance: float = 0.0
    source: str = ""
    nodes_per_domain: int = 1
    failures: Failures | None = None

    @property
    def ranks_per_domain(self) -> int:
        """Ranks that the links inside join."""
        return self.ranks_per_node * self.nodes_per_domain

    @cached_property
    def outside(self) -> Link:
        """Link `between` nodes, with the cards of a domain."""
        return replace(self.between, cards=self.between.cards * self.nodes_per_domain)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def slowest(self) -> float:
        """Factor on the computation of the slowest rank. Stragglers: the largest of n equal normal
        deviates grows as sqrt(2 ln n), so it does; `imbalance` is one standard deviation."""
        return 1 + self.imbalance * math.sqrt(2 * math.log(max(1, self.num_ranks)))

    @property
    def doubts(self) -> list[str]:
        """A line where `efficiency` is none that layers reach, with what it is likely to mean."""
        part, peak = self.device.efficiency, self.device.tflops
        if 0.1 <= part <= 1:  # whole models of small layers reach a tenth
            return []
        return [
            f"device.efficiency {part:.2g} of device.tflops {peak:g}: layers reach 0.3 to 0.7 of a "
            "device's dense peak; check that peak (TFLOP/s in the model's dtype), and that nothing "
            "else ran there"
        ]

    def with_ranks(self, num_ranks: int) -> "Cluster":
        """Return the same nodes, as many as `num_ranks` need; a part of one where they are fewer.

        Raises ConfigurationError where they do not fill the last node.
        """
        if num_ranks <= self.ranks_per_node:
            return replace(self, nodes=1, ranks_per_node=num_ranks, nodes_per_domain=1)
        nodes, rest = divmod(num_ranks, self.ranks_per_node)
        joined = min(self.nodes_per_domain, nodes)
        if rest:
            raise ConfigurationError(
                f"{self.name}: {num_ranks} ranks do not fill nodes of {self.ranks_per_node}; "
                f"give {nodes * self.ranks_per_node} or {(nodes + 1) * self.ranks_per_node}"
            )
        if nodes % joined:
            raise ConfigurationError(
                f"{self.name}: {num_ranks} ranks do not fill domains of {self.ranks_per_domain}; "
                "give whole ones, or in a file of yours nodes_per_domain as a job gets them"
            )
        return replace(self, nodes=nodes, nodes_per_domain=joined)


class Cost(NamedTuple):
    """Time of a collective, in seconds.

    busy_s: for which its slowest link is taken.
    latency_s: which pass while that is free for others.
    """

    busy_s: float = 0.0
    latency_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """Seconds until it ends where nothing else uses the links."""
        return self.latency_s + self.busy_s


@dataclass(frozen=True)
class Ring:
    """The ranks along one axis of a mesh, on the nodes of a cluster.

    size: ranks.
    in_node: of them on one node.
    rings_per_node: how many such rings use a node at the same time, because all ranks do the same.
    """

    size: int
    in_node: int
    rings_per_node: int

    @classmethod
    def of_axis(cls, size: int, distance: int, ranks_per_node: int) -> "Ring":
        """Make the ring of an axis. `distance`: of neighbours, in global ranks."""
        in_node = min(size, max(1, -(-ranks_per_node // distance)))
        return cls(size, in_node, max(1, ranks_per_node // in_node))

    @property
    def nodes(self) -> int:
        return -(-self.size // self.in_node)

    @property
    def crosses_nodes(self) -> bool:
        return self.nodes > 1

    def sharing_inside(self, link: Link) -> float:
        """Return how many ranks use one link within a node in a turn. The last rank of a node's
        part of a ring sends to another node."""
        return self.rings_per_node * (self.in_node - self.crosses_nodes) if link.shared else 1.0

    def sharing_between(self, link: Link) -> float:
        """Return how many ranks use one network card in a turn; below 1 if a rank has several."""
        return self.rings_per_node / link.cards

    def node_nbytes(self, nbytes: float) -> float:
        """Return the bytes that leave a node when all its rings gather or reduce-scatter tensors of
        `nbytes`: each ring leaves a node once and sends all pieces but one there."""
        if not self.crosses_nodes:
            return 0.0
        return self.rings_per_node * nbytes * (self.size - 1) / self.size

    def exchanged_node_nbytes(self, nbytes: float) -> float:
        """Bytes leaving a node when every rank sends each of `size` ranks its part of `nbytes`."""
        leaving = nbytes * (self.size - self.in_node) / self.size
        return self.rings_per_node * self.in_node * leaving

    def exchange(self, nbytes: float, cluster: Cluster) -> Cost:
        """Return an all-to-all's cost, where each rank holds `nbytes` for all ranks together."""
        if self.size == 1:
            return Cost()
        message = nbytes / self.size
        inside, between = cluster.inside, cluster.outside
        to_ranks_inside = self.in_node - 1
        sharing = self.rings_per_node * self.in_node if inside.shared else 1
        paces = [sharing * to_ranks_inside * message / inside.reached(message)]
        start_us, latency_us = inside.start_us, inside.latency_us
        if self.crosses_nodes:
            speed = between.cards * between.reached(message)
            paces.append(self.exchanged_node_nbytes(nbytes) / speed)
            start_us, latency_us = between.start_us, between.latency_us
        return Cost(max(paces), 1e-6 * (start_us + latency_us))

    def gather(self, nbytes: float, cluster: Cluster) -> Cost:
        """Return the cost of an all-gather or reduce-scatter of `nbytes` (the whole tensor): a turn
        of the ring, or where one rank of each node takes part NCCL's PAT, whichever is faster."""
        ring = self.turn(nbytes, cluster)
        if not (cluster.outside.trees and self.in_node == 1 and self.crosses_nodes):
            return ring
        between, hops = cluster.outside, self.nodes.bit_length() - 1
        latency_us = hops * between.latency_us / _PAT_OVERLAP + _PAT_RANK_US * self.size
        pat = Cost(ring.busy_s / _PAT_SPEED, 1e-6 * (between.start_us + latency_us))
        return min(ring, pat, key=lambda cost: cost.alone_s)

    def all_reduce(self, nbytes: float, cluster: Cluster) -> Cost:
        """Cost of all-reducing `nbytes`: two turns of the ring, or up and down a tree of nodes."""
        turn = self.turn(nbytes, cluster)
        ring = Cost(2 * turn.busy_s, 2 * turn.latency_s)
        if not (cluster.outside.trees and self.crosses_nodes):
            return ring
        between, hops = cluster.outside, self.nodes.bit_length() - 1
        latency_us = hops * between.latency_us + (self.in_node - 1) * cluster.inside.latency_us
        tree = Cost(ring.busy_s, 1e-6 * (between.start_us + 2 * latency_us))
        return min(ring, tree, key=lambda cost: cost.alone_s)

    def turn(self, nbytes: float, cluster: Cluster) -> Cost:
        """Return the cost of an all-gather or reduce-scatter of `nbytes` (the whole tensor).

        n - 1 messages of nbytes / n follow each other on each link; a piece passes every rank, so
        that the latency is the sum over one turn. All links work at the same time: the slowest
        sets the pace. Where several ranks use a link or a card, the others' messages fill the
        time for which one waits for its next, all but the last.
        """
        if self.size == 1:
            return Cost()
        message = nbytes / self.size
        sent = (self.size - 1) * message
        inside, between = cluster.inside, cluster.outside
        hops_between = self.nodes - 1
        hops_inside = self.size - 1 - hops_between
        latency_s = 1e-6 * (hops_inside * inside.latency_us + hops_between * between.latency_us)
        paces = [(0.0, 1.0)]  # seconds, and how many ranks use a link
        if self.in_node > 1:
            sharing = self.sharing_inside(inside)
            paces.append((sharing * sent / inside.reached(message), sharing))
        if self.crosses_nodes:
            sharing = self.sharing_between(between)
            paces.append((sharing * sent / between.reached(message), sharing))
        busy_s, sharing = max(paces)
        last = between if self.crosses_nodes else inside
        hidden_s = busy_s - busy_s / max(1.0, sharing)
        latency_s = max(1e-6 * last.latency_us, latency_s - hidden_s)
        return Cost(busy_s, 1e-6 * last.start_us + latency_s)
