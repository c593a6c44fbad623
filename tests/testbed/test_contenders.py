# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The systems of the comparison at their best: every one has the same fused Adam, and FSDP2 the
units that torchtitan gives it.
"""

import contextlib
import importlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from scripts.report.compare_rows import losses_agree
from scripts.testbed.contenders.megatron_run import train_megatron
from scripts.testbed.contenders.side_by_side import Contender, contenders
from scripts.testbed.contenders.torch_run import missing, train_torch
from scripts.testbed.contenders.workload import RankReport, Workload
from scripts.testbed.profile import NetworkProfile
from scripts.testbed.ranks import run_ranks
from tests.support.fabric import replace_default_group

WORK = Workload(
    layers=4, hidden=32, seq_length=16, samples=8, layer_ms=0.0, warm_up=1, steps=1
)  # fmt: skip
TWO_NODES = NetworkProfile(ranks_per_node=2)
OF_FSDP2 = {one.name: one for one in contenders(2, 2, WORK) if one.name.startswith("FSDP2")}
NUMEL = WORK.layers * WORK.layer_numel + WORK.embedding_numel + WORK.head_numel
_ADAM = importlib.import_module("torch.optim.adam")  # torch.optim hides it
LAYERS = [f"decoder.layers.{index}" for index in range(WORK.layers)]


@contextlib.contextmanager
def only_fused_adam() -> Iterator[list[int]]:
    """Elements that torch's fused kernel has updated on this rank; a loop over parameters, or over
    lists of them, is an error."""
    counted: list[int] = []
    update = torch._fused_adamw_

    def fused(params: list[torch.Tensor], *args, **kwargs) -> None:
        counted.append(sum(getattr(param, "_local_tensor", param).numel() for param in params))
        update(params, *args, **kwargs)

    loops = ("_single_tensor_adam", "_multi_tensor_adam")
    refused = {name: mock.Mock(side_effect=AssertionError(f"{name} ran")) for name in loops}
    with mock.patch.multiple(_ADAM, **refused), mock.patch.object(torch, "_fused_adamw_", fused):
        yield counted


def train_fused(one: Contender) -> tuple[RankReport, int]:
    """The report of a contender, and how many elements of this rank the fused kernel updated."""
    network = replace_default_group(TWO_NODES)
    with only_fused_adam() as counted:
        if one.torch_system:
            report = train_torch(network, WORK, one.torch_system)
        else:
            report = train_megatron(network, WORK, one.micro_batch, one.flags)
    return report, sum(counted)


@pytest.mark.slow
def test_every_contender_updates_all_by_a_fused_adam_in_every_step_and_learns_the_same():
    expected: list[float | None] = []
    for one in contenders(2, 2, WORK):
        if missing(one.torch_system):
            continue
        reports, updated = zip(*run_ranks(train_fused, 4, one), strict=True)
        assert sum(updated) >= (WORK.warm_up + WORK.steps + 1) * NUMEL, one.name
        assert all(report.optimizer_s > 0 for report in reports)
        losses = next(report.losses for report in reports if None not in report.losses)
        expected = expected or losses
        assert losses_agree(losses, expected), one.name
