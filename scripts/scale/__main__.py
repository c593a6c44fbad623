# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a world of many ranks costs a rank, rank 0, the store and the files: measured where one
machine can, and computed elsewhere.

    python -m scripts.scale --ranks 16384 --model 405b --sizes 8,8,16384
    python -m scripts.scale --ranks 64,1024,4096,16384,98304 --out FILE
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# torch asks for the name of each of many thousand connections, and waits where nobody knows it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from megatron_asynchzp.mcore.checkpoint.save_ranks import PARTS_OF_A_TENSOR
from megatron_asynchzp.planner.model import Model
from megatron_asynchzp.sharding.topology import ShardSizes
from scripts.report.records import replace
from scripts.report.scale_table import table
from scripts.scale.checkpoint import measure_checkpoint
from scripts.scale.costs import Cost
from scripts.scale.failure import MOST, costs_of, measure_storm
from scripts.scale.start import measure_start
from scripts.scale.step import MODELS, compute_step
from scripts.testbed.machine import machine_record

_ON_A_NODE = 8


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", default="64,1024,4096,16384,98304", help="numbers of ranks")
    parser.add_argument("--model", choices=MODELS, default="405b")
    parser.add_argument("--sizes", help="P,G,O; 8,8 and all ranks otherwise")
    parser.add_argument("--save-ranks", type=int, default=PARTS_OF_A_TENSOR, metavar="K")
    parser.add_argument("--out", type=Path, help="the record")
    args = parser.parse_args(argv)
    numbers = [int(number) for number in args.ranks.split(",")]
    # First: of a process with much in memory so many forks are slow.
    storms = {n: measure_storm(n) for n in sorted({min(ranks, MOST) for ranks in numbers})}
    lines = []
    for ranks in numbers:
        given = map(int, args.sizes.split(",")) if args.sizes else (8, 8, ranks)
        sizes = ShardSizes(*given).with_short_axes(_ON_A_NODE)
        sizes.check(ranks)
        found = _costs(ranks, MODELS[args.model], sizes, args.save_ranks)
        found += costs_of(ranks, storms[min(ranks, MOST)])
        of_run = {"kind": "cost", "model": args.model, "ranks": ranks}
        lines += [of_run | cost._asdict() for cost in found]
    print(table(lines))
    if args.out is not None:
        replace(args.out, [machine_record(), *lines])
    return 0


def _costs(ranks: int, model: Model, sizes: ShardSizes, save_ranks: int) -> list[Cost]:
    start = measure_start(ranks, sizes)
    files = measure_checkpoint(model, ranks, sizes, save_ranks)
    again = [cost for cost in (*start, *files) if cost.phase != "save" and cost.unit == "s"]
    restart = Cost("restart", "CPU of rank 0", "s", sum(cost.now for cost in again), False)
    return [*start, *compute_step(model, ranks, sizes), *files, restart]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
