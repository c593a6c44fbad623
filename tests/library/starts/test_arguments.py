# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What `shard` makes of its arguments."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp import ShardSizes
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.library.arguments import sizes_of_mesh


@pytest.mark.parametrize(
    ("shape", "begin", "size"),
    [((6,), 0, 6), ((2, 3), 0, 3), ((3, 2), 0, 2), ((1, 2, 3), 0, 0), ((6,), 1, 0), ((2, 2), 0, 0)],
)
def test_a_mesh_of_all_ranks_in_order_shards_over_its_last_dimension_and_no_other_is_taken(
    monkeypatch, shape, begin, size
):
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    numbers = torch.arange(begin, begin + torch.Size(shape).numel()).view(shape)
    mesh: Any = SimpleNamespace(mesh=numbers, ndim=numbers.ndim, size=numbers.size)
    if size:
        assert sizes_of_mesh(mesh) == ShardSizes(size, size, size)
    else:
        with pytest.raises(ConfigurationError, match=f"a mesh of {len(shape)} dimensions over"):
            sizes_of_mesh(mesh)
