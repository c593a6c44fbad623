# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the choices of a plan: sizes, batch, schedule, recomputation and how states travel."""

from dataclasses import dataclass

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.layout import FP32_NBYTES
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.activations import Recompute
from megatron_asynchzp.planner.memory import MomentBytes
from megatron_asynchzp.planner.model import Batch, Parallel
from megatron_asynchzp.planner.traffic import Wire


@dataclass(frozen=True)
class Plan:
    """All choices of a search, and the settings that it keeps."""

    sizes: ShardSizes  # of the dense sharding group
    parallel: Parallel
    batch: Batch
    schedule: ScheduleConfig = ScheduleConfig()
    recompute: Recompute = Recompute()
    wire: Wire = Wire()
    moments: MomentBytes = MomentBytes()
    # None as the engine restricts `sizes` to the experts' group
    expert_sizes: ShardSizes | None = None
    # a step begins before all parameter shards are rebuilt, as the engine's does
    overlaps_params: bool = True
    # each backward sums gradients over the whole group, as the engine's never does
    sums_each: bool = False
    has_loss_scale: bool = False  # gradients carry one, as in fp16
    is_on_cpu: bool = False  # a rank is a process of the CPU platform
    seated: tuple[str, ...] = ()  # kinds of units that CUDA graphs read, which then have seats
    main_grad: int = FP32_NBYTES  # bytes of an element of main gradients
    offload: float = 0.0  # the part of the optimizer states on the host
