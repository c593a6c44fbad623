# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the list of what is compared: each contender's flags at its best documented setting, or the
reason why it is not run.
"""

from dataclasses import dataclass

from megatron_asynchzp.testbed.contenders.workload import Workload
from megatron_asynchzp.testbed.megatron_flags import (
    DISTRIBUTED_OPTIMIZER,
    MEGATRON_FSDP,
    size_flags,
)

OURS, ND, SHARDED = "AsyncHZP", "stock ND", "sharded peer"

_NO_STREAMS = (
    "DeepSpeed has no streams on a CPU, so it waits for what it reduces; what it gathers it "
    "gathers ahead. On an accelerator it would hide more."
)
_TENSOR = ("--tensor-model-parallel-size", "2")
_PIPELINE = ("--pipeline-model-parallel-size", "2")


@dataclass(frozen=True)
class Contender:
    """One row. micro_batch: samples; torch_system: run without Megatron's loop, by torch_run.py;
    reason: why it is not run; note: what to know when reading its row."""

    name: str
    family: str
    micro_batch: int = 1
    flags: tuple[str, ...] = ()
    torch_system: str = ""
    reason: str = ""
    note: str = ""


def contenders(nodes: int, ranks_per_node: int, workload: Workload) -> list[Contender]:
    """All rows for a cluster, the reference of the losses first.

    A rank of plain data parallelism trains its samples as one micro-batch; tensor parallelism too,
    so a pair of ranks has one of twice that; pipelines have as many micro-batches as there are
    samples for a pipeline, the smallest bubble.
    """
    world, node = nodes * ranks_per_node, ranks_per_node
    batch = workload.samples // world
    unit = ("--suggested-communication-unit-size", str(2 * workload.layer_numel))
    instances = ("--num-distributed-optimizer-instances", str(nodes))
    # fmt: off
    return [
        Contender("DDP", ND, batch, ("--overlap-grad-reduce",)),
        Contender("distributed optimizer", ND, batch, tuple(DISTRIBUTED_OPTIMIZER)),
        Contender("TP 2", ND, 2 * batch, (*DISTRIBUTED_OPTIMIZER, *_TENSOR)),
        Contender("PP 2", ND, 1, (*DISTRIBUTED_OPTIMIZER, *_PIPELINE)),
        Contender(
            "PP 2, interleaved", ND, 1,
            (*DISTRIBUTED_OPTIMIZER, *_PIPELINE, "--num-layers-per-virtual-pipeline-stage",
             str(workload.layers // 4)),
        ),
        Contender("TP 2 x PP 2", ND, 1, (*DISTRIBUTED_OPTIMIZER, *_TENSOR, *_PIPELINE)),
        Contender("Megatron-FSDP ZeRO-3", SHARDED, batch, (*MEGATRON_FSDP, *unit)),
        Contender("Megatron-FSDP HSDP", SHARDED, batch, (*MEGATRON_FSDP, *unit, *instances)),
        Contender("FSDP2 ZeRO-3", SHARDED, batch, torch_system="fsdp2"),
        Contender("FSDP2 HSDP", SHARDED, batch, torch_system="hsdp"),
        Contender("DeepSpeed ZeRO-3", SHARDED, batch, torch_system="deepspeed", note=_NO_STREAMS),
        Contender(
            "DeepSpeed ZeRO-3 hpZ", SHARDED, batch, torch_system="deepspeed-hpz", note=_NO_STREAMS
        ),
        _ours(batch, node, node, world),
        _ours(batch, node, node, node),
        _ours(batch, world, world, world),
        _ours(batch, 1, node, world),
        _ours(batch, 1, 1, world),
        _ours(batch, node, node, world, "main-thread"),
        _ours(batch, node, node, world, "inline"),
    ]
    # fmt: on


def _ours(batch: int, p: int, g: int, o: int, schedule: str = "threaded") -> Contender:
    return Contender(
        f"AsyncHZP {schedule} ({p},{g},{o})",
        OURS,
        batch,
        (*size_flags((p, g, o)), "--asynchzp-schedule", schedule),
    )
