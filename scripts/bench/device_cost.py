# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a training step costs on the emulated device, beside the same step on the CPU and gloo, and
with the watch off. JSON lines with --out.

    python -m scripts.bench.device_cost --out device_cost.jsonl

Blocks take no time but that of their operations; each repetition starts every world anew, in turns.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from scripts.bench.device_steps import host_ms
from scripts.report.records import append
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.machine import machine_record
from scripts.testbed.ranks import run_ranks

_PRELOAD = ["scripts.testbed.contenders.systems"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append records to this file")
    args = parser.parse_args()
    if args.out is not None:
        append(args.out, machine_record())
    with DeviceWorlds(_PRELOAD) as worlds:
        systems: dict[str, Callable[[int], list[float]]] = {
            "gloo": lambda ranks: run_ranks(host_ms, ranks, "cpu"),
            "emulated device": lambda ranks: worlds.run(host_ms, ranks, "cuda"),
            "emulated device, no watch": lambda ranks: worlds.run(
                host_ms, ranks, "cuda", watches=False
            ),
        }
        for ranks in args.ranks:
            turns = [
                {name: max(run(ranks)) for name, run in systems.items()}
                for _ in range(args.repetitions)
            ]
            for name in systems:
                times = [turn[name] for turn in turns]
                record = {
                    "kind": "device_cost",
                    "system": name,
                    "ranks": ranks,
                    "step_ms": round(statistics.median(times), 1),
                    "fastest_ms": round(min(times), 1),
                    "slowest_ms": round(max(times), 1),
                    "repetitions": len(times),
                }
                print(json.dumps(record), flush=True)
                if args.out is not None:
                    append(args.out, record)


if __name__ == "__main__":
    main()
