# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A bit that has changed on one rank is seen by all, wherever another rank holds the same."""

import pytest
import torch
import torch.distributed as dist

from tests.mcore.test_data_parallel import tiny_config, wrap
from tests.support.selection import slow_unless
from tests.support.world import on_ranks

Sizes = tuple[int, int, int]
SOME: list[Sizes] = [(1, 1, 1), (2, 1, 2)]
REST: list[Sizes] = [(1, 1, 4), (1, 2, 4), (2, 2, 4), (4, 4, 4)]
STATES = (None, "parameters", "main parameters", "optimizer states")


def _messages_of(sizes: tuple[int, int, int]) -> dict[str | None, str]:
    """By state, what is raised where the lowest bit of its last element has changed on the last
    rank; of a bf16 model of one layer."""
    from megatron.core.transformer.module import MegatronModule

    from megatron_asynchzp.mcore.step.replicas import ReplicasDiffer, compare_replicas

    torch.manual_seed(1)
    chunk = MegatronModule(tiny_config())
    chunk.linear = torch.nn.Linear(8, 8)
    (chunk,) = wrap([chunk.bfloat16()], sizes)
    unit = chunk.units[0]
    moments = [torch.arange(unit.optim_range.numel, dtype=torch.float32) for _ in range(2)]
    shards = [torch.zeros(2), unit.model_param.storage, unit.main_param.storage, moments[1]]
    messages: dict[str | None, str] = {}
    for state, shard in zip(STATES, shards, strict=True):
        bits = shard.view(torch.int16)[-shard.element_size() // 2 :][:1]
        if dist.get_rank() == dist.get_world_size() - 1:
            bits ^= 1
        try:
            compare_replicas([chunk.runtime], lambda _: moments, 7)
            messages[state] = ""
        except ReplicasDiffer as error:
            messages[state] = str(error)
        if dist.get_rank() == dist.get_world_size() - 1:
            bits ^= 1
    chunk.communication.close()
    return messages


def _messages(of_sizes: list[Sizes]) -> dict:
    return {sizes: _messages_of(sizes) for sizes in of_sizes}


@pytest.mark.parametrize("of_sizes", [slow_unless(True, SOME), slow_unless(False, REST)])
def test_a_change_on_one_rank_is_named_by_all_wherever_another_rank_holds_the_same(of_sizes):
    first, *others = on_ranks(_messages, 4, of_sizes)
    assert all(found == first for found in others)
    for sizes, messages in first.items():
        for changed, message in messages.items():
            num_copies = 1 if changed is None else 4 // sizes[0 if changed == "parameters" else 2]
            if num_copies == 1:  # a change of what only one rank holds cannot be seen
                assert message == "", (sizes, changed)
                continue
            who = "are not the same on ranks 1, 3"
            if num_copies == 4:
                who = "on rank 3 are unlike those on ranks 0 to 2"
            begin = f"after step 7 replicas differ: {changed} of root {who}; a bit has"
            assert message.startswith(begin), (sizes, message)
