# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the engine's communicators are made with on NCCL, and that each can be made early."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.mcore.start.shard_groups import communicator_options
from scripts.testbed.ranks import run_ranks

CONFIG = """
dp_cp:
  max_ctas: 8
  min_ctas: 4
ep_dp:
  is_high_priority_stream: false
tp:
  max_ctas: 1
"""


@pytest.mark.parametrize(
    "name, file, expected",
    [
        ("dp_cp", None, (True, None)),
        ("dp_cp", CONFIG, (True, 8)),
        ("ep_dp", CONFIG, (False, None)),
        ("dp_cp", "tp:\n  max_ctas: 1\n", (True, None)),
    ],
)
def test_streams_of_ours_have_priority_and_megatrons_file_holds_for_them(
    name, file, expected, tmp_path, monkeypatch
):
    class Options(SimpleNamespace):
        def __init__(self, is_high_priority_stream):
            config = SimpleNamespace(max_ctas=None)
            super().__init__(is_high_priority_stream=is_high_priority_stream, config=config)

    path = None
    if file is not None:
        path = tmp_path / "nccl.yaml"
        path.write_text(file)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    limit = timedelta(seconds=7)
    settings = RunSettings(ShardSizes(1, 1, 1), timeout=limit, communicator_file=path and str(path))
    options = communicator_options(name, "nccl", settings)
    assert (options.is_high_priority_stream, options.config.max_ctas) == expected
    assert options._timeout == limit
    assert communicator_options(name, "gloo", settings) is None


def connect_all() -> bool:
    """Whether all groups of this rank have met, whatever its coordinates."""
    world, rank = dist.get_world_size(), dist.get_rank()
    topology = ShardTopology(world, rank, ShardSizes(1, 2, 4))
    groups = ShardGroups.create(topology, dist.group.WORLD, timedelta(seconds=20))
    groups.connect(torch.device("cpu"))
    return True


def test_ranks_use_all_communicators_of_all_axes_in_one_order():
    assert run_ranks(connect_all, 4) == [True] * 4
