# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One step of Megatron with experts, by the clock of the emulated device: layer by layer, and with
one micro-batch's backward beside the next one's forward (--overlap-moe-expert-parallel-comm), with
and without weight gradients that come late; stock and AsyncHZP. Prints a table; JSON lines with
--out.

    python -m scripts.bench.bench_overlap --out runs/overlap.jsonl

Attention, experts, collectives and messages take stated times, all else and the host take none, so
the figures are the same in every run and on a busy machine.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from scripts.bench.bench_device import FREED_LATE
from scripts.bench.overlap_steps import Times, measure_each
from scripts.report.overlap_table import overlap_table
from scripts.report.records import append
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.differences import worst_difference
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import (
    DISTRIBUTED_OPTIMIZER,
    MIXTURE_OF_EXPERTS,
    flags_of,
    shape_flags,
    size_flags,
)
from scripts.testbed.megatron_runs import gpt_args
from scripts.testbed.profile import NetworkProfile
from scripts.testbed.te.environment import te_folder

RANKS = 4
TIMES = Times(6e-3, 8e-3)
# One node, whose ranks share a link of 12.5 MB/s: the model is small.
NETWORK = NetworkProfile("device", intra_gbit=0.1, ranks_per_node=RANKS)
OVERLAPPED = ["--overlap-moe-expert-parallel-comm"]
SCHEDULES = {
    "layer by layer": [],
    "overlapped": OVERLAPPED,
    "overlapped, late": [*OVERLAPPED, "--delay-wgrad-compute"],
}
# A bucket for about each attention and each rank's experts, as a large model has them.
STOCK = [*DISTRIBUTED_OPTIMIZER, "--ddp-bucket-size", "16000"]
LOSS_TOLERANCE = 1e-5


def model_flags(ranks: int, experts_on: int, layers: int, micro_batches: int) -> list[str]:
    """experts_on: ranks that a layer's four experts are on; micro_batches: of a rank."""
    # fmt: off
    return gpt_args(
        "--bf16", *shape_flags(layers, 64, 256), *MIXTURE_OF_EXPERTS, "--moe-grouped-gemm",
        *flags_of({
            "ffn-hidden-size": 128, "moe-ffn-hidden-size": 64, "attention-backend": "unfused",
            "expert-model-parallel-size": experts_on, "global-batch-size": ranks * micro_batches,
        }),
        # Stock's host waits for its search for NaN in each bucket before it reduces it.
        "--no-bias-swiglu-fusion", "--clip-grad", "1000", "--no-check-for-nan-in-loss-and-grad",
    )
    # fmt: on


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--experts-on", type=int, nargs="+", default=[2, 4], help="ranks")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a rank")
    parser.add_argument("--sizes", type=int, nargs=3, default=[2, 2, 4], help="P, G and O of ours")
    parser.add_argument("--time-limit", type=float, default=500.0, help="seconds per world")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args()
    systems = {"stock": STOCK, "AsyncHZP": size_flags(args.sizes)}
    records: list[dict[str, Any]] = []
    te_folder()
    with DeviceWorlds(["scripts.testbed.te.preload"]) as worlds:
        for experts_on in args.experts_on:
            for system, flags in systems.items():
                base = model_flags(RANKS, experts_on, args.layers, args.micro_batches)
                lines = [[*base, *flags, *more] for more in SCHEDULES.values()]
                given = lines, TIMES, NETWORK
                seen = worlds.run(
                    measure_each, RANKS, *given, env=FREED_LATE, timeout_s=args.time_limit
                )
                of_system = {
                    "kind": "step",
                    "experts_on": experts_on,
                    "system": system,
                    "layers": args.layers,
                    "micro_batches": args.micro_batches,
                    "sizes": args.sizes if system == "AsyncHZP" else None,
                }
                records += [
                    of_system | {"schedule": schedule} | mean_of(steps)
                    for schedule, steps in zip(SCHEDULES, zip(*seen, strict=True), strict=True)
                ]
                print(overlap_table(records), flush=True)
    if args.out:
        append(args.out, machine_record(), *records)
    # Another schedule adds gradients up in another order, which bf16 makes 1e-4 of.
    for experts_on, schedule in product(args.experts_on, SCHEDULES):
        setting = experts_on, schedule
        losses = [
            one["losses"] for one in records if (one["experts_on"], one["schedule"]) == setting
        ]
        if worst_difference(*losses) > LOSS_TOLERANCE:
            raise SystemExit(f"{schedule}, experts on {experts_on} ranks: losses {losses}")


def mean_of(steps: Any) -> dict[str, Any]:
    """steps: of each rank. Means over ranks; the losses are the same on all."""
    times = [name for name in steps[0]._fields if name != "losses"]
    means = {name: sum(getattr(step, name) for step in steps) / len(steps) for name in times}
    return {name: round(value, 3) for name, value in means.items()} | {"losses": steps[0].losses}


if __name__ == "__main__":
    main()
