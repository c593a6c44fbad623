# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which ranks of a run belong together: one line per kind of group, from Megatron's own
process groups and our topology.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_asynchzp.planning.pretended_world import Stage
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology, spans_nodes


@dataclass(frozen=True)
class GroupKind:
    """Groups of one kind: `count` of `size` ranks in the run, of which `first` holds rank 0.

    shares: what its ranks have in common, or divide between them.
    """

    name: str
    shares: str
    size: int
    count: int
    first: tuple[int, ...]

    def link(self, ranks_per_node: int) -> str:
        if self.size == 1:
            return "-"
        return "between nodes" if spans_nodes(self.first, ranks_per_node) else "in one node"


def group_kinds(stage: Stage, args: Namespace, sizes: ShardSizes | None) -> list[GroupKind]:
    """Of the stage of rank 0. sizes: AsyncHZP's, None for stock Megatron."""
    groups = stage.groups
    kinds = [
        ("tensor parallel", "parts of each weight", groups.tp),
        ("pipeline parallel", "one model", groups.pp),
        ("context parallel", "one sequence", groups.cp),
        ("data x context parallel", "dense parameters of a stage", groups.dp_cp),
    ]
    if args.num_experts:
        kinds.append(("expert parallel", "experts of a layer", groups.ep))
        kinds.append(("expert data parallel", "equal experts", groups.expt_dp))
    made = [_of_group(name, shares, group, args) for name, shares, group in kinds]
    if sizes is None:
        made += _optimizer_kinds(stage, args)
        return made
    for prefix, group in (("", groups.dp_cp), ("expert ", groups.expt_dp)):
        if not prefix or args.num_experts:
            made += _shard_kinds(prefix, group, sizes.restricted_to(group.size()), args)
    return made


def _of_group(name: str, shares: str, group: dist.ProcessGroup, args: Namespace) -> GroupKind:
    ranks = tuple(dist.get_process_group_ranks(group))
    return GroupKind(name, shares, len(ranks), args.world_size // len(ranks), ranks)


def _optimizer_kinds(stage: Stage, args: Namespace) -> list[GroupKind]:
    if not args.use_distributed_optimizer:
        return []
    shares = "one copy of the optimizer states (distributed optimizer)"
    made = [_of_group("optimizer", shares, stage.groups.dp_cp, args)]
    if args.num_experts:
        made.append(_of_group("expert optimizer", shares, stage.groups.expt_dp, args))
    return made


def _shard_kinds(
    prefix: str, group: dist.ProcessGroup, sizes: ShardSizes, args: Namespace
) -> list[GroupKind]:
    """Which ranks hold one copy of each state together."""
    ranks: Sequence[int] = dist.get_process_group_ranks(group)
    topology = ShardTopology(len(ranks), group.rank(), sizes)
    made = []
    for state, size in (("param", sizes.param), ("grad", sizes.grad), ("optim", sizes.optim)):
        owners = tuple(ranks[member] for member in topology.owner_ranks(size))
        shares = f"one copy of the {prefix}{state} state"
        made.append(
            GroupKind(f"{prefix}{state} shards", shares, size, args.world_size // size, owners)
        )
    return made
