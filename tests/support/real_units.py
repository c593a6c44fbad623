# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's own models of a command line, on the meta device in a world that is not there, and the
bytes of the engine's own units of them: what the planner's formulas are held against.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_asynchzp.cpu_platform.arguments import CPU_VALUES
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.sharding.layout import FP32_NBYTES, grad_pieces
from megatron_asynchzp.engine.sharding.topology import ShardTopology
from megatron_asynchzp.engine.zero.step import memory_in_flight_of
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.mcore.run.planned import costing_of
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.mcore.start.start_table import preview_of_units
from megatron_asynchzp.mcore.start.state_bytes import state_nbytes_by_formula
from megatron_asynchzp.mcore.start.units import plan_megatron_units, sharding_group_key
from megatron_asynchzp.planner.memory import Copies, Memory, stage_activations

Chunks = Sequence[torch.nn.Module]


def stages(args: Namespace) -> Iterator[tuple[int, Chunks, Any]]:
    """Each pipeline stage in turn, as its first rank has it: index, model chunks in the dtype of
    training, and Megatron's process groups. args: validated; not of a hybrid model."""
    num_stages = args.pipeline_model_parallel_size
    apart = args.world_size // num_stages
    if args.use_tp_pp_dp_mapping:
        apart = args.tensor_model_parallel_size * args.context_parallel_size
    for index in range(num_stages):
        with _world(args, index * apart) as groups:
            yield index, _build(args, groups), groups


@contextlib.contextmanager
def _world(args: Namespace, rank: int) -> Iterator[Any]:
    """Megatron's process groups as `rank` sees them; nothing is ever sent."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=args.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _build(args: Namespace, groups: Any) -> Chunks:
    """With Megatron's own builder, of its local layers: their parameters have the shapes of
    Transformer Engine's, which need not be installed."""
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models import build_virtual_pipeline_stages

    without_kernels = CPU_VALUES | {"perform_initialization": False}
    config = gpt_config_from_args(Namespace(**(vars(args) | without_kernels)))
    # Checked by now, and refused by the local layers; it changes no shape.
    config.transformer.sequence_parallel = False

    def without_checks(self: torch.nn.Module, *_: object, **__: object) -> None:
        torch.nn.Module.__init__(self)  # the core attention has no parameters

    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("meta")),
        mock.patch.object(torch.cuda, "Stream", object),
        mock.patch.object(DotProductAttention, "__init__", without_checks),
        mock.patch.object(  # megatron-core 0.20, which asks isinstance() of None
            multi_token_prediction,
            "is_inference_column_parallel_linear",
            lambda _: False,
            create=True,
        ),
        # A tied embedding on two stages is sent from one to the other.
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        torch.device("meta"),
    ):
        build = config.get_builder_cls()(config).build_model
        virtual = args.virtual_pipeline_model_parallel_size
        chunks = [*build_virtual_pipeline_stages(build, groups, virtual)]
    # As Float16Module does.
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return [chunk.to(dtype) for chunk in chunks]


def numel_of(chunks: Chunks) -> dict[str, int]:
    """Of a rank's parameters, by sharding group."""
    numel = {"dense": 0, "expert": 0}
    for param in (param for chunk in chunks for param in chunk.parameters()):
        numel[sharding_group_key(param)] += param.numel()
    return numel


def memory_of(index: int, chunks: Chunks, pg_collection: Any, args: Namespace) -> Memory:
    """Of the engine's own units. As in the planner, moments count with the padding."""
    costing, run = costing_of(args), RunSettings.of_arguments(args)
    schedule, moments = run.schedule, run.moment_nbytes
    groups = {}
    for key, group in (("dense", pg_collection.dp_cp), ("expert", pg_collection.expt_dp)):
        ranks = dist.get_process_group_ranks(group)
        topology = ShardTopology(len(ranks), group.rank(), run.sizes.restricted_to(len(ranks)))
        made = ShardGroups.of_topology(
            topology, ranks, lambda _, ranks: dist.new_group(list(ranks)), run.grad_dtype
        )
        groups[key] = replace(made, main_grad_dtype=run.main_grad_dtype)
    of_chunks = [
        [
            HZPUnit(plan.name, plan.params, groups[plan.group_key], layer=plan.layer)
            for plan in plan_megatron_units(chunk, number)
        ]
        for number, chunk in enumerate(chunks)
    ]
    units = [unit for chunk in of_chunks for unit in chunk]
    return Memory.of_rank(
        state_nbytes_by_formula(units, moments, with_padding=True),
        [memory_in_flight_of(chunk, schedule) for chunk in of_chunks],
        max(unit.layout.padded_numel * unit.dtype.itemsize for unit in units),
        stage_activations(costing.setting, index),
        schedule,
        _copies(units, schedule.grad_slot_nbytes) if costing.plan.is_on_cpu else None,
        preview_of_units(
            schedule,
            units,
            moments,
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.qk_layernorm,
        ),
    )


def _copies(units: Sequence[HZPUnit], slot_nbytes: int) -> Copies:
    trained = [unit for unit in units if unit.is_trained]
    pieces = (
        grad_pieces(unit.layout, unit.groups.topology.sizes.grad, slot_nbytes)[0].numel
        for unit in trained
        if not unit.reduces_in_place
    )
    added = (
        param.numel()
        for unit in trained
        if unit.reduces_in_place and unit.dtype != torch.float32
        for param in unit.params
    )
    return Copies(
        max(unit.in_flight(slot_nbytes).params for unit in units),
        FP32_NBYTES * max(pieces, default=0),
        FP32_NBYTES * max(added, default=0),
    )
