# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The systems of the comparison at their best: every one has the same fused Adam, and FSDP2 the
units that torchtitan gives it.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from scripts.report.compare_rows import losses_agree
from scripts.testbed.contenders.adam import FusedAdam, new_adamw
from scripts.testbed.contenders.megatron_run import train_megatron
from scripts.testbed.contenders.side_by_side import Contender, contenders
from scripts.testbed.contenders.torch_run import (
    batches,
    initialize,
    missing,
    new_model,
    new_stepper,
    train_torch,
)
from scripts.testbed.contenders.workload import RankReport, Workload
from scripts.testbed.fabric.network import Network
from scripts.testbed.fabric.streams import install_streams
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


def test_every_adam_of_a_process_is_fused_and_its_steps_are_measured():
    param = torch.nn.Parameter(torch.ones(8))
    param.grad = torch.ones(8)
    for build in (torch.optim.AdamW, torch.optim.Adam, new_adamw):
        optimizer, adam = build([param]), FusedAdam()
        with only_fused_adam() as counted, mock.patch.object(torch, "_fused_adam_", mock.Mock()):
            optimizer.step()
        adam.remove()
        assert adam.seconds > 0 and optimizer.param_groups[0]["fused"]
        assert counted == [8] or build is torch.optim.Adam
    before = adam.seconds
    torch.optim.SGD([param]).step()
    assert adam.seconds == before


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


class Trained(NamedTuple):
    """losses: of every step; units: modules that FSDP2 knows; gathers: all-gathers of a step, after
    the first; groups: kinds of operations by group; fused: elements updated by the fused kernel."""

    losses: list[float]
    units: list[str]
    gathers: float
    groups: dict[str, set[str]]
    fused: int


def train_every_row() -> dict[str, Trained]:
    network = replace_default_group(TWO_NODES)
    install_streams()
    initialize(WORK)
    return {name: trained(network, one) for name, one in OF_FSDP2.items()}


def trained(network: Network, one: Contender) -> Trained:
    model = new_model()
    with only_fused_adam() as fused:
        stepper = new_stepper(one.torch_system, model, WORK, network)
        first, *others = batches(WORK)
        losses = [stepper.step(*first)]
        before = network.counters.snapshot()
        losses += [stepper.step(*batch) for batch in others]
    gained = network.counters.since(before)
    groups: dict[str, set[str]] = {}
    for account in gained:
        groups.setdefault(account.group, set()).add(account.kind)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    gathers = [tally.operations for account, tally in gained.items() if "gather" in account.kind]
    return Trained(losses, units, sum(gathers) / len(others), groups, sum(fused))


@pytest.mark.slow  # fast in test_trainers.py, in one of the rows
def test_every_row_of_fsdp2_learns_the_same_in_the_units_of_torchtitan():
    assert len(OF_FSDP2) >= 4
    ranks = run_ranks(train_every_row, 4)
    expected = ranks[0]["FSDP2 ZeRO-3"].losses
    assert expected[-1] < expected[0]
    for name, row in ranks[0].items():
        assert losses_agree(row.losses, expected), name
        assert row.units == ["", "embedding", *LAYERS, "decoder.final_layernorm", "output_layer"]
        copies = 2 if "HSDP" in name else 1
        updated = sum(of_rank[name].fused for of_rank in ranks)
        assert updated == copies * len(row.losses) * NUMEL, name
        # Every unit once; for backward again what was not kept: neither the embedding, which
        # backward does not read, nor the last layer and the output.
        is_kept = "kept" in name or "ZeRO-2" in name
        assert row.gathers == WORK.layers + 2 + (0 if is_kept else WORK.layers - 1), name
        # Gathering and reducing have groups of their own, or one would wait for the other.
        for kinds in row.groups.values():
            assert not ("gather" in (words := " ".join(kinds)) and "scatter" in words), row.groups
