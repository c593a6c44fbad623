# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The communicators that a dry run counts are those that the engine makes."""

from argparse import Namespace

import pytest

from megatron_asynchzp.commands.group_kinds import (
    Communicators,
    GroupKind,
    RankGroups,
    engine_communicators,
)
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology, spans_nodes
from megatron_asynchzp.planner.traffic import Group

_WORLD = 16


def _sharding(**flags: int) -> list[GroupKind]:
    """Of 16 ranks, from validated arguments as far as groups of ranks depend on them."""
    sizes = {
        name: flags.get(name, 1)
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_tensor_parallel_size",
            "expert_model_parallel_size",
        )
    }
    experts = flags.get("num_experts")
    args = Namespace(world_size=_WORLD, use_tp_pp_dp_mapping=False, num_experts=experts, **sizes)
    return list(RankGroups(args).sharding.values())


def _made(ranks: tuple[int, ...], sizes: ShardSizes, ranks_per_node: int) -> Communicators:
    """Those of rank 0 of a sharding group, by the engine's own arithmetic."""
    topology = ShardTopology(len(ranks), 0, sizes.restricted_to(len(ranks)))
    groups = ShardGroups.of_topology(topology, ranks, lambda purpose, members: (purpose, members))  # pyright: ignore
    wide = [spans_nodes(members, ranks_per_node) for _, members in groups.all_groups]  # pyright: ignore
    return Communicators(wide.count(False), wide.count(True))


@pytest.mark.parametrize("ranks_per_node", [2, 4, 8, 16])
def test_the_communicators_are_those_of_the_engine_for_every_chain_of_sizes(ranks_per_node: int):
    powers = [1, 2, 4, 8, 16]
    for optim in powers:
        for param in filter(lambda size: size <= optim, powers):
            for grad in filter(lambda size: size <= optim, powers):
                sizes = ShardSizes(param, grad, optim)
                for tp in (1, 2):
                    groups = _sharding(tensor_model_parallel_size=tp)
                    ranks = tuple(range(0, _WORLD, tp))
                    found = engine_communicators(groups, sizes, ranks_per_node)
                    asked = sizes.restricted_to(len(ranks))
                    assert found == _made(ranks, asked, ranks_per_node)
                    planned = Group(len(ranks), asked).num_communicators
                    assert planned == found.in_node + found.between_nodes


def test_experts_have_communicators_of_their_own():
    groups = _sharding(num_experts=4, expert_model_parallel_size=2)
    sizes = ShardSizes(2, 2, 8)
    dense, expert = (_made(tuple(range(0, _WORLD, step)), sizes, 8) for step in (1, 2))
    found = engine_communicators(groups, sizes, 8)
    assert found.in_node == dense.in_node + expert.in_node
    assert found.between_nodes == dense.between_nodes + expert.between_nodes


def test_nccls_buffers_follow_its_settings(monkeypatch: pytest.MonkeyPatch):
    """9.2 MiB a channel, from NCCL's defaults: 4 MiB, 4,915,200 and 524,288 bytes."""
    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE"):
        monkeypatch.delenv(name, raising=False)
    connection = 4194304 + 4915200 + 524288
    assert Communicators(2, 1).nbytes == 24 * 4 * connection
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
    assert Communicators(2, 1).nbytes == 8 * 4 * connection
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    monkeypatch.setenv("NCCL_BUFFSIZE", "1048576")
    assert Communicators(1, 0).nbytes == 16 * (connection - 3 * 2**20)
