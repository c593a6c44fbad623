# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint holds the experts of a grouped GEMM as it holds experts that are computed one after
another, so the same rules convert both.

The grouped GEMM itself needs Transformer Engine and a GPU. What Megatron saves of it does not: its
classes are taken from Megatron's source and put on a plain module.
"""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_asynchzp.hf.mapping import EXPERTS, rules_of, state_keys
from scripts.testbed.ranks import run_ranks
from tests.hf.models import shapes
from tests.support.selection import slow_unless

_NUM_EXPERTS, _NUM_LAYERS = 4, 2  # as those of shapes()

_LINEARS = ("TEGroupedLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")


@pytest.mark.parametrize("tensor_parallel, expert_parallel", [(1, 2), slow_unless(False, 2, 1)])
def test_a_checkpoint_holds_grouped_experts_as_it_holds_single_ones(
    tensor_parallel, expert_parallel
):
    shape = shapes()["mixtral"]
    known = {rule.key for rule in rules_of(shape)} | set(state_keys(shape))
    for single, grouped in run_ranks(saved_both_ways, 2, tensor_parallel, expert_parallel):
        assert (
            known > {key for key, *_ in single} > {f"{EXPERTS}linear_fc{i}.weight" for i in (1, 2)}
        )
        assert grouped == single


def saved_both_ways(tensor_parallel: int, expert_parallel: int) -> tuple[list, list]:
    """Body of a rank: what it saves of the second layer's experts, single ones and grouped."""
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel, expert_model_parallel_size=expert_parallel
    )
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=_NUM_LAYERS,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=_NUM_EXPERTS,
        moe_ffn_hidden_size=8,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=tensor_parallel,
        expert_model_parallel_size=expert_parallel,
        sequence_parallel=tensor_parallel > 1,
        use_cpu_initialization=True,
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    single = SequentialMLP(_NUM_EXPERTS // expert_parallel, config, linears, pg_collection=groups)
    grouped = grouped_from(single, groups)
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    second_layer = ((0, 1, _NUM_LAYERS),)
    prefix = "decoder.layers.mlp.experts."
    return (
        _saved(single.sharded_state_dict(prefix, second_layer, dict(metadata))),
        _saved(grouped.sharded_state_dict(prefix, second_layer, dict(metadata))),
    )


def grouped_from(single: Any, groups: Any) -> Any:
    """Megatron's TEGroupedMLP with the weights of a SequentialMLP, to be saved and not computed."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    grouped: Any = TEGroupedMLP.__new__(TEGroupedMLP)
    torch.nn.Module.__init__(grouped)
    grouped.config, grouped.num_local_experts = single.config, single.num_local_experts
    grouped.ep_group, grouped.tp_group = groups.ep, groups.expt_tp
    classes = _grouped_linears()
    for name, kind in (("linear_fc1", _LINEARS[1]), ("linear_fc2", _LINEARS[2])):
        linear = classes[kind].__new__(classes[kind])
        torch.nn.Module.__init__(linear)
        linear.num_gemms, linear.use_bias = single.num_local_experts, False
        linear._pg_collection, linear._tp_group = groups, groups.expt_tp
        linear.fp8_meta, linear.fp8, linear.fp8_calibration = (
            {"fp8_checkpoint": False},
            False,
            False,
        )
        for index, expert in enumerate(single.local_experts):
            linear.register_parameter(f"weight{index}", getattr(expert, name).weight)
        setattr(grouped, name, linear)
    return grouped


class _GroupedLinear(torch.nn.Module):
    """In place of Transformer Engine's."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


def _grouped_linears() -> dict[str, Any]:
    """Megatron's classes by name, which it defines only where Transformer Engine is installed."""
    from megatron.core.extensions import transformer_engine as module

    tree = ast.parse(Path(module.__file__).read_text())
    classes: list[ast.stmt] = [
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in _LINEARS
    ]
    engine = SimpleNamespace(pytorch=SimpleNamespace(GroupedLinear=_GroupedLinear))
    with mock.patch.object(module, "te", engine):
        names = dict(vars(module))
        exec(compile(ast.Module(classes, []), module.__file__, "exec"), names)
    return names


def _saved(state: dict[str, Any]) -> list:
    """Key, size, place in it and sum of every tensor; key of every object; which rank writes it."""
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )

    entries = []
    for value in state.values():
        pieces = value.build() if isinstance(value, ShardedTensorFactory) else [value]
        for piece in pieces:
            if isinstance(piece, ShardedObject):
                entries.append((piece.unique_key, piece.replica_id))
                continue
            assert isinstance(piece, ShardedTensor) and piece.data is not None
            place = (piece.global_shape, piece.global_offset, piece.local_shape)
            total = piece.data.detach().double().sum().item()
            entries.append((piece.key, *place, total, piece.replica_id))
    return sorted(entries)
