# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How often each unit of a pipeline stage is gathered and reduced in one training step: Megatron's
pretrain() on 4 gloo ranks, PP 2, in the 1F1B schedule. Deterministic. JSON lines with --out.

    python -m scripts.bench.count_pipeline --out docs/results/records/pipeline.jsonl
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

from megatron_asynchzp.comm.driver import Driver
from megatron_asynchzp.comm.task import Task
from scripts.report.records import replace
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import UNTIED, size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from scripts.testbed.ranks import run_ranks

NUM_RANKS, STAGES, STEPS = 4, 2, 3
COUNTED_STEP = 2  # the first one records the order of uses


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8], help="of a stage")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if min(*args.layers, args.micro_batches) < 1:
        parser.error("--layers and --micro-batches are at least 1")
    counted = [line for layers in args.layers for line in measure(layers, args.micro_batches)]
    for line in counted:
        print(json.dumps(line))
    if args.out:
        replace(args.out, [machine_record(), *counted])


def measure(layers: int, micro_batches: int) -> list[dict]:
    """One line for each unit of each stage, as the first rank of the stage asked. Starts ranks."""
    counts = run_ranks(_counted_run, NUM_RANKS, layers, micro_batches, env={"OMP_NUM_THREADS": "1"})
    found = {"stages": STAGES, "layers_of_a_stage": layers, "micro_batches": micro_batches}
    return [
        found | {"kind": "count", "stage": stage, "unit": unit, **of_unit}
        for stage, of_stage in enumerate(counts[:: NUM_RANKS // STAGES])
        for unit, of_unit in of_stage
    ]


def _counted_run(layers: int, micro_batches: int) -> list[tuple[str, dict[str, int]]]:
    """On the ranks: collectives that this rank asked for in one step, by unit."""
    asked: Counter[tuple[str, str]] = Counter()
    submit = Driver.submit

    def counting_submit(self: Driver, task: Task) -> Task:
        if self.step == COUNTED_STEP:
            asked[task.unit, task.lane] += 1
        return submit(self, task)

    data_ranks = NUM_RANKS // STAGES
    argv = gpt_args(
        *("--pipeline-model-parallel-size", str(STAGES), "--num-layers", str(STAGES * layers)),
        *("--global-batch-size", str(micro_batches * data_ranks), "--train-iters", str(STEPS)),
        *(*UNTIED, *size_flags((data_ranks, data_ranks, data_ranks))),
    )
    with mock.patch.object(Driver, "submit", counting_submit):
        units = run_pretrain(
            argv, inspect=lambda chunks, _: [unit.name for unit in chunks[0].runtime.units]
        ).inspected
    lanes = {"gathers": "gather", "reductions": "reduce"}
    return [(unit, {key: asked[unit, lane] for key, lane in lanes.items()}) for unit in units]


if __name__ == "__main__":
    main(sys.argv[1:])
