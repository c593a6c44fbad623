# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the list of contenders: each one's flags at its best documented setting."""

from dataclasses import dataclass

from scripts.testbed.contenders.workload import Workload
from scripts.testbed.megatron_flags import (
    DISTRIBUTED_OPTIMIZER,
    MEGATRON_FSDP,
    PIPELINE_PARALLEL,
    TENSOR_PARALLEL,
    flags_of,
    size_flags,
)

OURS, ND, SHARDED = "AsyncHZP", "stock ND", "sharded peer"

_NO_STREAMS = (
    "DeepSpeed has no streams on a CPU, so it waits for what it reduces; what it gathers it "
    "gathers ahead. On an accelerator it would hide more."
)
MICRO_BATCHES = 8  # of a pipeline, in `pipelines`


@dataclass(frozen=True)
class Contender:
    """One row.

    `micro_batch`: samples; `torch_system`: run without Megatron's loop, by torch_run.py; `reason`:
    why it is not run; `note`: what to know when reading its row.
    """

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
        Contender("TP 2", ND, 2 * batch, (*DISTRIBUTED_OPTIMIZER, *TENSOR_PARALLEL)),
        Contender("PP 2", ND, 1, (*DISTRIBUTED_OPTIMIZER, *PIPELINE_PARALLEL)),
        Contender(
            "PP 2, interleaved", ND, 1,
            (*DISTRIBUTED_OPTIMIZER, *PIPELINE_PARALLEL, "--num-layers-per-virtual-pipeline-stage",
             str(workload.layers // 4)),
        ),
        Contender(
            "TP 2 x PP 2", ND, 1, (*DISTRIBUTED_OPTIMIZER, *TENSOR_PARALLEL, *PIPELINE_PARALLEL)
        ),
        Contender("Megatron-FSDP ZeRO-3", SHARDED, batch, (*MEGATRON_FSDP, *unit)),
        Contender("Megatron-FSDP HSDP", SHARDED, batch, (*MEGATRON_FSDP, *unit, *instances)),
        Contender("FSDP2 ZeRO-3", SHARDED, batch, torch_system="fsdp2"),
        Contender("FSDP2 ZeRO-2", SHARDED, batch, torch_system="fsdp2-kept"),
        Contender("FSDP2 HSDP", SHARDED, batch, torch_system="hsdp"),
        Contender("FSDP2 HSDP, params kept", SHARDED, batch, torch_system="hsdp-kept"),
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


def pipelines(nodes: int, ranks_per_node: int, workload: Workload) -> list[Contender]:
    """Interleaved pipelines of 2 stages with 2 chunks each, the reference of the losses first.

    With the stages of a pipeline in one node, data-parallel ranks are on different nodes, so that
    parameters and gradients cross the slow links; with data-parallel ranks in one node only
    activations do. A budget for one chunk, or for both chunks of a rank, is so much for parameters,
    and as much again for gradients.
    """
    chunk = 4 * (workload.layers // 4 * workload.layer_numel + workload.embedding_numel)
    interleaved = (
        *PIPELINE_PARALLEL,
        *flags_of({"num-layers-per-virtual-pipeline-stage": workload.layers // 4}),
    )
    size = nodes * ranks_per_node // 2
    sharded = (*size_flags((size, size, size)), "--asynchzp-schedule", "threaded", *interleaved)
    stock = (*DISTRIBUTED_OPTIMIZER, *interleaved)
    stages_inside = "--use-tp-pp-dp-mapping"
    budgets = {
        "": {},
        ", params of a chunk kept": {"params": 1},
        ", params and grads of a chunk kept": {"params": 1, "grads": 1},
        ", params and grads of both chunks kept": {"params": 2, "grads": 2},
    }
    ours = [
        Contender(f"AsyncHZP{name}", OURS, 1, (*sharded, stages_inside, *_keep(chunks, chunk)))
        for name, chunks in budgets.items()
    ]
    return [
        Contender("distributed optimizer", ND, 1, (*stock, stages_inside)),
        *ours,
        Contender("distributed optimizer, data-parallel ranks in a node", ND, 1, stock),
        Contender("AsyncHZP, data-parallel ranks in a node", OURS, 1, sharded),
    ]


def _keep(chunks: dict[str, int], chunk_nbytes: int) -> list[str]:
    """Flags that keep so many chunks of "params" and of "grads"."""
    return flags_of(
        {
            f"asynchzp-keep-{what}-gb": f"{number * chunk_nbytes / 2**30:.6f}"
            for what, number in chunks.items()
        }
    )
