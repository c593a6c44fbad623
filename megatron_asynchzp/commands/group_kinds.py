# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which ranks belong together, from Megatron's arithmetic of ranks and our topology."""

from argparse import Namespace
from typing import NamedTuple

from megatron_asynchzp.engine.sharding.topology import ShardSizes, spans_nodes
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
