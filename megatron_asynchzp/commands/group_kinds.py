# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which ranks belong together, and the engine's communicators on a rank with their buffers."""

import os
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology, spans_nodes
from megatron_asynchzp.mcore.flags.shard_sizes import STATES


class GroupKind(NamedTuple):
    """The groups of a kind."""

    name: str
    shares: str  # What its ranks have in common, or divide between them.
    size: int
    count: int  # Groups in the run.
    first: tuple[int, ...]  # The ranks of rank 0's group.

    def link(self, ranks_per_node: int) -> str:
        if self.size == 1:
            return "-"
        return "between nodes" if spans_nodes(self.first, ranks_per_node) else "in one node"


class RankGroups:
    """The groups of rank 0, by Megatron's arithmetic of ranks, for validated arguments."""

    def __init__(self, args: Namespace):
        from megatron.core.parallel_state import RankGenerator

        pp, order = args.pipeline_model_parallel_size, "tp-cp-ep-dp-pp"
        if args.use_tp_pp_dp_mapping:
            order = "tp-cp-ep-pp-dp"
        tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
        dense = RankGenerator(tp, 1, args.world_size // (tp * cp * pp), pp, cp, order)
        tp, ep = args.expert_tensor_parallel_size, args.expert_model_parallel_size
        expert = RankGenerator(tp, ep, args.world_size // (tp * ep * pp), pp, 1, order)
        self._generators, self._world_size = {"dense": dense, "expert": expert}, args.world_size
        shares = "dense parameters of a stage"
        self.sharding = {"": self.along("data x context parallel", shares, "dp-cp")}
        if args.num_experts:
            shares = "equal experts"
            self.sharding["expert "] = self.along("expert data parallel", shares, "dp", "expert")

    def along(self, name: str, shares: str, axes: str, generator: str = "dense") -> GroupKind:
        groups = self._generators[generator].get_ranks(axes)
        ranks = next(tuple(group) for group in groups if 0 in group)
        return GroupKind(name, shares, len(ranks), self._world_size // len(ranks), ranks)


def group_kinds(args: Namespace, ranks: RankGroups, sizes: ShardSizes | None) -> list[GroupKind]:
    """Return the groups of rank 0 in its pipeline stage; `sizes` is None for stock Megatron."""
    sharding = ranks.sharding
    kinds = [
        ranks.along("tensor parallel", "parts of each weight", "tp"),
        ranks.along("pipeline parallel", "one model", "pp"),
        ranks.along("context parallel", "one sequence", "cp"),
        sharding[""],
    ]
    if "expert " in sharding:
        kinds.append(ranks.along("expert parallel", "experts of a layer", "ep", "expert"))
        kinds.append(sharding["expert "])
    for prefix, group in sharding.items():
        if sizes is not None:
            kinds += _shard_kinds(prefix, group, sizes.restricted_to(group.size))
        elif args.use_distributed_optimizer:
            shares = "one copy of the optimizer states (distributed optimizer)"
            kinds.append(group._replace(name=f"{prefix}optimizer", shares=shares))
    return kinds


def _shard_kinds(prefix: str, group: GroupKind, sizes: ShardSizes) -> list[GroupKind]:
    return [
        GroupKind(
            f"{prefix}{state} shards",
            f"one copy of the {prefix}{state} state",
            size := getattr(sizes, state),
            group.size * group.count // size,
            group.first[:size],
        )
        for state in STATES
    ]


# ---- communicators

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
        """Bytes of NCCL's rings. Not measured: NCCL may take a tree or NVLS in addition."""
        # A channel of a ring keeps the buffers of a connection in a node, where a peer reads or
        # writes them, and of two between nodes, where a network card does.
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
