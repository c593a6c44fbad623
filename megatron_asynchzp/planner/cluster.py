# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the abilities of a cluster: its ranks, devices and links."""

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
    """One accelerator."""

    tflops: float  # dense peak in the model's dtype
    memory_gib: float
    efficiency: float = 0.5  # the part of it that a layer reaches, in (0, 1]
    memory_gb_s: float = 2000.0
    reserved_gib: float = 4.0  # for the driver, Megatron's communicators and the allocator
    # of each communicator of the engine, in addition (HCCL's buffers)
    communicator_mib: float = 0.0
    attention_tflops: float = 0.0  # of fused attention, as measured; 0: as the rest of a layer
    # of a unit's forward in addition to its FLOPs, twice that backward (host, norms)
    launch_us: float = 0.0
    # of the host between an optimizer and the next step's first unit (logging, data)
    step_us: float = 0.0

    @property
    def flops_per_s(self) -> float:
        return 1e12 * self.tflops * self.efficiency

    @property
    def attention_flops_per_s(self) -> float:
        """FLOPs per second that attention's scores and their product with the values reach."""
        return 1e12 * self.attention_tflops or self.flops_per_s

    @property
    def usable_nbytes(self) -> float:
        return GIB * (self.memory_gib - self.reserved_gib)


@dataclass(frozen=True)
class Link:
    """The link between the ranks of a node, or between the nodes."""

    gb_s: float  # 1e9 bytes/s, each way, of a rank's link inside a node or of a card between nodes
    latency_us: float = 0.0  # of a message from a rank to the next
    start_us: float = 0.0  # of a collective of any size
    cards: int = 1  # of a node, for the link between nodes; ranks share them if they are fewer
    shared: bool = False  # whether all ranks of a node share the link inside it
    trees: bool = False  # whether small collectives between nodes may go along a tree, as NCCL's do
    # (bytes of a message, part of gb_s) in ascending order, interpolated over log(bytes)
    efficiency: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def reached(self, message_nbytes: float) -> float:
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
    """Equal nodes of equal devices."""

    name: str
    nodes: int
    ranks_per_node: int
    device: Device
    inside: Link  # within a domain
    between: Link  # from domain to domain
    runs_ahead: bool = True  # whether the host issues work ahead of the device, as with CUDA
    imbalance: float = 0.0  # how much longer the slowest rank computes than the mean (stragglers)
    source: str = ""  # of the figures
    nodes_per_domain: int = 1  # that the links inside join: 18 of 4 GB200s share NVLink
    failures: Failures | None = None

    @property
    def ranks_per_domain(self) -> int:
        return self.ranks_per_node * self.nodes_per_domain

    @cached_property
    def outside(self) -> Link:
        return replace(self.between, cards=self.between.cards * self.nodes_per_domain)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def slowest(self) -> float:
        """Factor on the computation of the slowest rank."""
        # The largest of n equal normal deviates grows as sqrt(2 ln n); `imbalance` is one standard
        # deviation.
        return 1 + self.imbalance * math.sqrt(2 * math.log(max(1, self.num_ranks)))

    @property
    def doubts(self) -> list[str]:
        """A line on an `efficiency` that no layer reaches, with its likely meaning."""
        part, peak = self.device.efficiency, self.device.tflops
        if 0.1 <= part <= 1:  # whole models of small layers reach a tenth
            return []
        return [
            f"device.efficiency {part:.2g} of device.tflops {peak:g}: layers reach 0.3 to 0.7 of a "
            "device's dense peak; check that peak (TFLOP/s in the model's dtype), and that nothing "
            "else ran there"
        ]

    def with_ranks(self, num_ranks: int) -> "Cluster":
        """Return the same nodes, or part of a node, for `num_ranks`, which fill the last node."""
        if num_ranks <= self.ranks_per_node:
            return replace(self, nodes=1, ranks_per_node=num_ranks, nodes_per_domain=1)
        nodes, rest = divmod(num_ranks, self.ranks_per_node)
        joined, fault = min(self.nodes_per_domain, nodes), ""
        if rest:
            whole = nodes * self.ranks_per_node
            fault = f"nodes of {self.ranks_per_node}; give {whole} or {whole + self.ranks_per_node}"
        elif nodes % joined:
            fault = (
                f"domains of {self.ranks_per_domain}; give whole ones, or in a file of yours "
                "nodes_per_domain as a job gets them"
            )
        if fault:
            raise ConfigurationError(f"{self.name}: {num_ranks} ranks do not fill {fault}")
        return replace(self, nodes=nodes, nodes_per_domain=joined)


class Cost(NamedTuple):
    """The time of a collective, in seconds."""

    busy_s: float = 0.0  # the slowest link is taken
    latency_s: float = 0.0  # the links are free for others

    @property
    def alone_s(self) -> float:
        return self.latency_s + self.busy_s


@dataclass(frozen=True)
class Ring:
    """The ranks along one axis of a mesh, on the nodes of a cluster."""

    size: int
    in_node: int  # its ranks on one node
    rings_per_node: int  # that use a node at the same time

    @classmethod
    def of_axis(cls, size: int, distance: int, ranks_per_node: int) -> "Ring":
        """Make the ring of an axis whose neighbours are `distance` global ranks apart."""
        in_node = min(size, max(1, -(-ranks_per_node // distance)))
        return cls(size, in_node, max(1, ranks_per_node // in_node))

    @property
    def nodes(self) -> int:
        return -(-self.size // self.in_node)

    @property
    def crosses_nodes(self) -> bool:
        return self.nodes > 1

    def sharing_inside(self, link: Link) -> float:
        """Return how many ranks use one link within a node in a turn."""
        # The last rank of a node's part of a ring sends to another node.
        return self.rings_per_node * (self.in_node - self.crosses_nodes) if link.shared else 1.0

    def sharing_between(self, link: Link) -> float:
        """Return how many ranks use one network card in a turn; below 1 if a rank has several."""
        return self.rings_per_node / link.cards

    def node_nbytes(self, nbytes: float) -> float:
        """Return the bytes that leave a node: each ring leaves it once, with all pieces but one."""
        if not self.crosses_nodes:
            return 0.0
        return self.rings_per_node * nbytes * (self.size - 1) / self.size

    def exchanged_node_nbytes(self, nbytes: float) -> float:
        """Return the bytes that leave a node when every rank sends each rank a part of `nbytes`."""
        leaving = nbytes * (self.size - self.in_node) / self.size
        return self.rings_per_node * self.in_node * leaving

    def exchange(self, nbytes: float, cluster: Cluster) -> Cost:
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
        """Return the cost of an all-gather or reduce-scatter of a whole tensor of `nbytes`."""
        # It is a turn of the ring, or a faster NCCL PAT if one rank of each node takes part.
        ring = self.turn(nbytes, cluster)
        if not (cluster.outside.trees and self.in_node == 1 and self.crosses_nodes):
            return ring
        between, hops = cluster.outside, self.nodes.bit_length() - 1
        latency_us = hops * between.latency_us / _PAT_OVERLAP + _PAT_RANK_US * self.size
        pat = Cost(ring.busy_s / _PAT_SPEED, 1e-6 * (between.start_us + latency_us))
        return min(ring, pat, key=lambda cost: cost.alone_s)

    def all_reduce(self, nbytes: float, cluster: Cluster) -> Cost:
        """Return an all-reduce's cost: two turns of the ring, or up and down a tree of nodes."""
        turn = self.turn(nbytes, cluster)
        ring = Cost(2 * turn.busy_s, 2 * turn.latency_s)
        if not (cluster.outside.trees and self.crosses_nodes):
            return ring
        between, hops = cluster.outside, self.nodes.bit_length() - 1
        latency_us = hops * between.latency_us + (self.in_node - 1) * cluster.inside.latency_us
        tree = Cost(ring.busy_s, 1e-6 * (between.start_us + 2 * latency_us))
        return min(ring, tree, key=lambda cost: cost.alone_s)

    def turn(self, nbytes: float, cluster: Cluster) -> Cost:
        """Return the cost of a turn of the ring with a whole tensor of `nbytes`.

        n - 1 messages of nbytes / n follow each other on each link. A piece passes every rank, so
        the latency is the sum over one turn. All links work at once, and the slowest sets the pace.
        On a shared link or card the messages of other ranks fill the time in which a rank waits for
        its next message, except the last.
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
