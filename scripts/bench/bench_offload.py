# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second against the device memory of optimizer states, of which a part is on the host
between two updates, by the clock of the emulated device. Prints a table; JSON lines with --out.

    python -m scripts.bench.bench_offload --out runs/offload.jsonl

Computation, collectives and copies take stated times, updates and the host take none, so the
figures are the same in every run and on a busy machine.
"""

import argparse
from pathlib import Path
from typing import Any

from scripts.bench.offload_steps import measure
from scripts.report.offload_table import offload_table
from scripts.report.records import append
from scripts.testbed.contenders.delayed_model import ModelSize
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.machine import machine_record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    parser.add_argument("--links", type=float, nargs="+", default=[0.1, 0.7])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--block-ms", type=float, default=5.0, help="stated time of a forward")
    parser.add_argument("--comm", type=float, default=0.5, help="a gather's time / a forward's")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args()
    records: list[dict[str, Any]] = []
    with DeviceWorlds(["scripts.bench.offload_steps"]) as worlds:
        for micro_batches in args.micro_batches:
            size = ModelSize(16, args.blocks, 16, args.block_ms, micro_batches)
            given = size, args.tokens, args.comm, args.links, args.fractions
            records += worlds.run(measure, 4, *given, timeout_s=600)[0]
    print(offload_table(records))
    if args.out:
        append(args.out, machine_record(), *records)
    for micro_batches in args.micro_batches:
        losses = {one["loss"] for one in records if one["micro_batches"] == micro_batches}
        if len(losses) > 1:
            raise SystemExit(f"other losses with states on the host: {losses}")


if __name__ == "__main__":
    main()
