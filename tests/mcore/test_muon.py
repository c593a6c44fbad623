# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Muon on fragments is Megatron's Muon on whole matrices; what is not a matrix has Adam."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import _get_param_groups
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import nn

from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.comm.schedules import start_driver
from megatron_asynchzp.comm.timeline import Timeline
from megatron_asynchzp.device import device_of
from megatron_asynchzp.mcore.muon import ShardedMuon, build_muon, muon_overrides
from megatron_asynchzp.mcore.planned import moments_nbytes
from megatron_asynchzp.mcore.state_bytes import state_nbytes_allocated, state_nbytes_by_formula
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.buffer import FlatBuffer
from megatron_asynchzp.zero.unit import HZPUnit
from megatron_asynchzp.zero.whole_matrices import Matrix
from tests.support.engine import nested_sizes
from tests.support.recording_device import RecordingDevice
from tests.support.scheduler_program import recorded_groups
from tests.support.thread_ranks import on_threads

SHAPES = [(24, 8), (8, 8), (32, 8), (8, 32), (3, 5), (16, 16)]
IS_QKV = (True, False, False, False, False, False)
QKV = [8, 2, 2]
STEPS = 20


def new_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)  # threads share the global one
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


def new_driver() -> Driver:
    return Driver(Timeline(device_of(torch.zeros(1))))


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
    driver = driver or new_driver()
    optimizer = ShardedMuon(param_groups, matrices, fragments, driver, options(nesterov))
    for step in range(STEPS):
        grads = grads_of(step)
        for unit, own in ((units[0], grads[:4]), (units[1], grads[4:])):
            unit.main_grad.copy_params(own)
        optimizer.step()
    return [unit.main_param for unit in units]


@pytest.mark.parametrize("nesterov", [False, True])
def test_twenty_steps_on_shards_of_every_nesting_are_those_of_muon_on_whole_matrices(nesterov):
    whole = train_whole(nesterov)
    for sizes in nested_sizes(4):
        for first, second in on_threads(partial(train_sharded, nesterov), 4, sizes):
            for buffer, expected in ((first, whole[:4]), (second, whole[4:])):
                reference = type(buffer)(buffer.layout, buffer.range, buffer.storage.clone())
                reference.copy_params(expected)
                torch.testing.assert_close(
                    buffer.storage, reference.storage, rtol=1e-5, atol=1e-5, msg=str(sizes)
                )


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 2, 8), (2, 4, 8), (8, 8, 8)])
def test_on_streams_the_exchange_of_matrices_keeps_all_memory_until_it_was_used(sizes):
    device = RecordingDevice()
    with device.recording():
        driver = start_driver(ScheduleConfig("main-thread"), device)
        train_sharded(True, recorded_groups(sizes, rank=5), driver)
        driver.close()
    assert {collective.operation for collective in device.collectives} == {"all-to-all"}
    assert device.races == []


class _Layers(nn.Module):
    """Parameters with the names, shapes and attributes of a Megatron model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(10, 8)
        self.embedding.weight.is_embedding_or_output_parameter = True
        self.linear_qkv = nn.Linear(8, 24)
        self.experts = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(4, 4, 3)


def build(optimizer_config: OptimizerConfig, groups: ShardGroups):
    """Both optimizers of a model whose shards are whole, the unit, and the parameters' names."""
    chunk = _Layers()
    chunk.config = SimpleNamespace(num_attention_heads=4, num_query_groups=1, kv_channels=4)
    unit = HZPUnit("all", list(chunk.named_parameters()), groups)
    chunk.units = [unit]
    chunk.communication = SimpleNamespace(driver=new_driver())
    fragments = {
        param: nn.Parameter(values)
        for param, values in zip(unit.params, unit.main_param_fragments())
    }
    for param, grad in zip(unit.params, unit.main_grad_fragments()):
        fragments[param].grad = grad
    alone = {
        "get_world_size": lambda *_: 1,
        "all_gather_object": lambda everyone, mine: everyone.__setitem__(0, mine),
    }
    with mock.patch.multiple(torch.distributed, **alone):
        param_groups = _get_param_groups([chunk], optimizer_config, muon_overrides())
    for group in param_groups:
        group["params"] = [fragments[param] for param in group["params"]]
        group["lr"], group["weight_decay"] = 0.01, 0.0
    names = ("tp", "expt_tp", "gtp_remat", "expt_gtp_remat")
    optimizers, init_state = build_muon(
        optimizer_config, [chunk], param_groups, fragments, SimpleNamespace(**dict.fromkeys(names))
    )
    return optimizers, init_state, unit, fragments


CONFIG = OptimizerConfig(optimizer="muon", lr=0.01, weight_decay=0.0, muon_fp32_matmul_prec="high")


@pytest.fixture
def built():
    (one,) = on_threads(partial(build, CONFIG), 1, (1, 1, 1))
    return one


def test_embeddings_norms_biases_and_tensors_that_are_no_matrices_have_adam(built):
    optimizers, init_state, unit, fragments = built
    init_state(None, CONFIG)
    states = {
        name: {key for one in optimizers for key in one.state.get(fragments[param], ())}
        for name, param in zip(unit.param_names, unit.params, strict=True)
    }
    have_muon = {name for name, keys in states.items() if keys == {"momentum_buffer"}}
    assert have_muon == {"linear_qkv.weight", "experts.weight"}
    assert all({"exp_avg", "exp_avg_sq"} <= states[name] for name in set(states) - have_muon)


def test_the_start_table_counts_one_momentum_of_matrices_and_two_moments_of_the_rest(built):
    optimizers, init_state, unit, _ = built
    init_state(None, CONFIG)
    held = {
        value.data_ptr(): value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim()  # not a counter of steps
    }
    fp32 = torch.float32
    args = SimpleNamespace(optimizer="muon", exp_avg_dtype=fp32, exp_avg_sq_dtype=fp32)
    for state_nbytes in (state_nbytes_by_formula, state_nbytes_allocated):
        counted = state_nbytes([unit], moments_nbytes(args))["optimizer_moments"]
        assert counted == sum(held.values())


def test_queries_keys_and_values_are_orthogonalised_apart(built):
    (muon, _), _, unit, fragments = built
    for index, param in enumerate(unit.params):
        torch.manual_seed(index)
        fragments[param].grad.copy_(torch.randn(param.numel()))
    (qkv,) = [p for n, p in zip(unit.param_names, unit.params) if n == "linear_qkv.weight"]
    before = fragments[qkv].detach().clone()
    muon.step()
    update = (before - fragments[qkv].detach()).view(24, 8) / 0.01
    # One query group: four heads of queries, one of keys and one of values, of 4 rows each. The
    # momentum is a multiple of the first gradient, and a multiple is orthogonalised to the same.
    alone = TensorParallelMuon([qkv], fp32_matmul_prec="high")
    parts = fragments[qkv].grad.view(24, 8).split([16, 4, 4])
    apart = torch.cat([alone.orthogonalize(qkv, part) for part in parts])
    torch.testing.assert_close(update, apart, rtol=1e-4, atol=1e-4)
