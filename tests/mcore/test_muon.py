# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Muon on fragments is Megatron's Muon on whole matrices."""

import pytest
import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch import nn

from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.timeline import Timeline
from megatron_asynchzp.engine.device import device_of
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.buffer import FlatBuffer
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.engine.zero.whole_matrices import Matrix
from megatron_asynchzp.mcore.step.muon import ShardedMuon, _has_adam, muon_overrides
from scripts.testbed.ranks import run_ranks
from tests.support.engine import nested_sizes, shard_groups
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import recorded_groups
from tests.support.selection import slow_unless

SHAPES = [(24, 8), (8, 8), (32, 8), (8, 32), (3, 5), (16, 16)]
IS_QKV = (True, False, False, False, False, False)
QKV = [8, 2, 2]
STEPS = 20


def new_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for param, is_qkv in zip(params, IS_QKV):
        param.is_qkv = is_qkv
    return params


def grads_of(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def options(nesterov: bool) -> dict:
    return {
        "lr": 0.02,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "nesterov": nesterov,
        "fp32_matmul_prec": "high",
        "split_qkv": True,
        "is_qkv_fn": lambda param: param.is_qkv,
        "qkv_split_shapes": QKV,
    }


def train_whole(nesterov: bool) -> list[torch.Tensor]:
    params = new_params()
    optimizer = TensorParallelMuon(params, **options(nesterov))
    for step in range(STEPS):
        for param, grad in zip(params, grads_of(step)):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


def train_sharded(
    nesterov: bool, groups: ShardGroups, driver: Driver | None = None
) -> list[FlatBuffer]:
    """What this rank's optimizer shard holds in the end, and where it lies."""
    named = [(str(index), param) for index, param in enumerate(new_params())]
    units = [HZPUnit("a", named[:4], groups), HZPUnit("b", named[4:], groups)]
    matrices = [Matrix(unit, index) for unit in units for index in range(len(unit.params))]
    fragments = {}
    for matrix in matrices:
        values = matrix.unit.main_param_fragments()[matrix.index]
        if values.numel():
            fragments[matrix.param] = nn.Parameter(values)
            fragments[matrix.param].grad = matrix.unit.main_grad_fragments()[matrix.index]
    param_groups = [{"params": [*fragments.values()]}]
    driver = driver or Driver(Timeline(device_of(torch.zeros(1))))
    optimizer = ShardedMuon(param_groups, matrices, fragments, driver, options(nesterov))
    for step in range(STEPS):
        grads = grads_of(step)
        for unit, own in ((units[0], grads[:4]), (units[1], grads[4:])):
            unit.main_grad.copy_params(own)
        optimizer.step()
    return [unit.main_param for unit in units]


def check_every_nesting(nesterov: bool) -> None:
    whole = train_whole(nesterov)
    for sizes in nested_sizes(4):
        first, second = train_sharded(nesterov, shard_groups(sizes))
        for buffer, expected in ((first, whole[:4]), (second, whole[4:])):
            reference = FlatBuffer(buffer.layout, buffer.range, buffer.storage.clone())
            reference.copy_params(expected)
            torch.testing.assert_close(
                buffer.storage, reference.storage, rtol=1e-5, atol=1e-5, msg=str(sizes)
            )


@pytest.mark.parametrize("nesterov", [slow_unless(False, False), slow_unless(True, True)])
def test_twenty_steps_on_shards_of_every_nesting_are_those_of_muon_on_whole_matrices(nesterov):
    run_ranks(check_every_nesting, 4, nesterov)


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 2, 8), (2, 4, 8), (8, 8, 8)])
def test_on_streams_the_exchange_of_matrices_keeps_all_memory_until_it_was_used(sizes):
    device = RecordingDevice()
    with device.recording():
        driver = start_driver(ScheduleConfig("main-thread"), device)
        train_sharded(True, recorded_groups(sizes, rank=5), driver)
        driver.close()
    assert {collective.operation for collective in device.collectives} == {"all-to-all"}
    assert device.races == []


def test_a_parameter_has_adam_where_megatrons_own_rule_for_muon_says_so():
    """From 0.20 on a module may keep a matrix from Muon by name (Mamba its input projection)."""
    (key,) = muon_overrides()
    for shape in ((4,), (4, 4), (2, 4, 4)):
        for marks in ({}, {"use_muon": False}, {"is_embedding_or_output_parameter": True}):
            param = nn.Parameter(torch.zeros(shape))
            vars(param).update(marks)
            assert _has_adam(param) == key.predicate.fn(param), (shape, marks)
