# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks whose models differ in anything that is trained with are refused by name."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ConfigurationError, ShardSizes, shard
from megatron_asynchzp.library.arguments import default_sizes
from scripts.testbed.ranks import run_ranks

Change = Callable[[torch.Tensor], torch.Tensor]


def flipped(values: torch.Tensor) -> torch.Tensor:
    """Signs at two places: no sum of bits changes by it."""
    other = values.clone()
    other.view(-1)[[0, 3]] *= -1
    return other


def turned(values: torch.Tensor) -> torch.Tensor:
    return values.roll(1, 0)


EYE = torch.eye(6)
# Values on the first rank, and what the second one makes of them.
DIFFERENT: dict[str, tuple[torch.Tensor, Change]] = {
    "a permutation": (EYE, turned),
    "two rows": (torch.arange(36.0).view(6, 6), lambda x: x[[1, 0, 2, 3, 4, 5]]),
    "the same sum": (torch.tensor([[1.0, 2.0, 2.0, 1.0]]), lambda x: 3 - x),
    "signs that cancel": (torch.tensor([1.0, 2.0, 3.0, -1.0]), flipped),
    "signs of float64": (torch.tensor([1.0, 2.0, 3.0, -1.0]).double(), flipped),
    "zeros": (torch.zeros(3), torch.neg),
    "nans": (torch.full((2,), torch.nan), lambda x: (x.view(torch.int32) + 1).view(x.dtype)),
    "a mask": (EYE.bool(), turned),
    "positions": (torch.arange(9), turned),
    "small integers": (torch.arange(9, dtype=torch.int16), turned),
    "rotations": (torch.polar(torch.ones(9), torch.arange(9.0)), turned),
    "a dtype": (torch.arange(9), lambda x: x.int()),
    "a shape": (EYE, lambda x: x[:5]),
}  # fmt: skip


def new_model(values: torch.Tensor, is_frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if is_frozen:
        model[1].table = nn.Parameter(values, requires_grad=False)
    else:
        model[1].register_buffer("table", values, persistent=False)
    return model


def sharded(model: nn.Module, sizes: ShardSizes = ShardSizes(2, 2, 2)) -> None:
    shard(model, list(model), sizes, torch.optim.AdamW).close()


def check_differences() -> None:
    for what, (values, change) in DIFFERENT.items():
        for is_frozen in {False, values.is_floating_point() and values.dtype != torch.bool}:
            changed = change(values)
            is_like = (changed.dtype, changed.shape) == (values.dtype, values.shape)
            text = "1.table has other values on rank 1" if is_like else "1.table is torch"
            other = changed if dist.get_rank() else values
            with pytest.raises(ConfigurationError, match=text):
                sharded(new_model(other.clone(), is_frozen))
                pytest.fail(what)
    sharded(new_model(EYE.clone(), False))
    renamed = new_model(EYE.clone(), False)
    renamed[1].register_buffer(f"of_{dist.get_rank()}", torch.zeros(1))
    with pytest.raises(ConfigurationError, match="1.of_0 is .*a buffer on rank 0 and missing on"):
        sharded(renamed)


def test_a_frozen_tensor_or_a_buffer_that_differs_between_ranks_is_refused_by_name():
    run_ranks(check_differences, 2)


def test_without_sizes_parameters_stay_within_a_node_that_divides_the_ranks(monkeypatch):
    found = {}
    for node in (1, 2, 3, 4, 8):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
        found[node] = default_sizes(4)
    assert found == {
        1: ShardSizes(1, 1, 4),
        2: ShardSizes(2, 2, 4),
        3: ShardSizes(4, 4, 4),  # nodes of 3 do not divide 4 ranks
        4: ShardSizes(4, 4, 4),
        8: ShardSizes(4, 4, 4),
    }
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert default_sizes(4) == ShardSizes(4, 4, 4)
