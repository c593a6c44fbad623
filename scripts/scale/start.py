# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what a rank does for its groups, in a world whose other ranks are not there."""

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology
from scripts.scale.costs import Cost, in_process, use

_ASKING = ("all_gather_object", "gather_object", "broadcast_object_list")


def measure_start(ranks: int, sizes: ShardSizes) -> list[Cost]:
    cpu_s, mb, asked = in_process(_make_groups, ranks, sizes)
    return [
        Cost("start", "groups: CPU of a rank", "s", cpu_s),
        Cost("start", "groups: memory of a rank", "MB", mb),
        Cost("start", "groups: lists of others", "MB", asked),
        Cost("start", "store: connections", "", 2 * ranks, False),
    ]


def _make_groups(ranks: int, sizes: ShardSizes) -> tuple[float, float, int]:
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
    asked: list[str] = []
    for name in _ASKING:
        setattr(dist, name, lambda *_, name=name, **__: asked.append(name))
    topology, world = ShardTopology(ranks, ranks // 2, sizes), dist.group.WORLD
    assert world is not None
    used = use(lambda: ShardGroups.create(topology, world))
    return used.cpu_s, used.mb, len(asked)
