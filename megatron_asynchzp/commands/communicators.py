# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the number of the engine's communicators on a rank, and the bytes of their buffers."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_asynchzp.commands.group_kinds import GroupKind
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology, spans_nodes

# What NCCL's source has as defaults (init.cc): buffers of a connection for its three protocols,
# which have a setting each.
_BUFFERS = {
    "NCCL_BUFFSIZE": 4 << 20,
    "NCCL_LL128_BUFFSIZE": 120 * 640 * 8 * 8,
    "NCCL_LL_BUFFSIZE": 8 * 512 * 8 * 16,
}
# The settings that bound channels, the newer one first; else what 8 H100 on NVLink have.
_CHANNELS, _USUAL_CHANNELS = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"), 24


# HCCL keeps two buffers for each communicator, of MB of 2^20 bytes (CANN's documentation).
_HCCL_BUFFER, _USUAL_HCCL_MB = "HCCL_BUFFSIZE", 200


@dataclass(frozen=True)
class Communicators:
    """Communicators of the engine on one rank: those within one node, and the others."""

    in_node: int
    between_nodes: int

    @property
    def nbytes(self) -> int:
        """Bytes of NCCL's rings. Not measured: NCCL may take a tree or NVLS in addition.

        A channel of a ring keeps the buffers of a connection in a node, where a peer reads or
        writes them, and of two between nodes, where a network card does.
        """
        connection = sum(int(os.environ.get(name, usual)) for name, usual in _BUFFERS.items())
        bounds = (os.environ.get(name) for name in _CHANNELS)
        channels = int(next(filter(None, bounds), _USUAL_CHANNELS))
        return connection * channels * (self.in_node + 2 * self.between_nodes)

    @property
    def hccl_nbytes(self) -> int:
        """Bytes of HCCL's buffers on Ascend: one to send, one to receive. Not measured."""
        megabytes = int(os.environ.get(_HCCL_BUFFER) or _USUAL_HCCL_MB)
        return 2 * megabytes * 2**20 * (self.in_node + self.between_nodes)


def engine_communicators(
    sharding: Iterable[GroupKind], sizes: ShardSizes, ranks_per_node: int
) -> Communicators:
    crossings: list[bool] = []
    for group in sharding:
        topology = ShardTopology(group.size, 0, sizes.restricted_to(group.size))
        gathering = topology.axes_between(1, topology.sizes.optim)
        for axis in (*gathering, *topology.axes):  # reducing has its own
            ranks = [group.first[member] for member in axis.members]
            crossings.append(spans_nodes(ranks, ranks_per_node))
    return Communicators(crossings.count(False), crossings.count(True))
