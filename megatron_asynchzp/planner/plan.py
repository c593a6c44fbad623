# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a plan chooses: sizes, batch, schedule, what is recomputed and how states travel."""

from dataclasses import dataclass

from megatron_asynchzp.planner.activations import Recompute
from megatron_asynchzp.planner.memory import MomentBytes
from megatron_asynchzp.planner.model import Batch, Parallel
from megatron_asynchzp.planner.traffic import Wire
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.layout import FP32_NBYTES
from megatron_asynchzp.sharding.topology import ShardSizes


@dataclass(frozen=True)
class Plan:
    """Everything that a search chooses, and what it leaves as it is.

    sizes: of the dense sharding group.
    expert_sizes: of the experts', None as the engine restricts `sizes` to their group.
    overlaps_params: whether a step begins before all parameter shards are rebuilt, as the engine's
        does.
    sums_each: whether gradients are summed over the whole group in each backward, as the engine's
        never are.
    is_on_cpu: whether a rank is a process of the CPU platform.
    has_loss_scale: whether gradients carry one, as in fp16.
    seated: kinds of units that CUDA graphs read, which then have seats.
    main_grad: bytes of an element of main gradients.
    offload: the part of the optimizer states that is on the host.
    """

    sizes: ShardSizes
    parallel: Parallel
    batch: Batch
    schedule: ScheduleConfig = ScheduleConfig()
    recompute: Recompute = Recompute()
    wire: Wire = Wire()
    moments: MomentBytes = MomentBytes()
    expert_sizes: ShardSizes | None = None
    overlaps_params: bool = True
    sums_each: bool = False
    has_loss_scale: bool = False
    is_on_cpu: bool = False
    seated: tuple[str, ...] = ()
    main_grad: int = FP32_NBYTES
    offload: float = 0.0
