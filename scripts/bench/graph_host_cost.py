# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Host time of a layer and micro-batch with CUDA graphs around sharded layers and without, beside
FSDP2, on the emulated device. Prints a line for each system; JSON lines with --out.

    python -m scripts.bench.graph_host_cost --out runs/graph_host_cost.jsonl

What the threads that issue work take of a core; the device's own work is on other threads.
"""

import argparse
from pathlib import Path

from scripts.bench.graph_cost import SYSTEMS, measure
from scripts.bench.host_cost import summary
from scripts.report.records import append
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.machine import machine_record

_ENV = {"ASYNCHZP_DEVICE_FREES": "late"}  # as FSDP2 needs it, see bench_device


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--params", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args()
    records: list[dict] = []
    with DeviceWorlds(["scripts.bench.graph_cost"]) as worlds:
        for params in args.params:
            found = [
                worlds.run(measure, 2, SYSTEMS, params, timeout_s=600, env=_ENV, watches=False)[0]
                for _ in range(args.repetitions)
            ]
            for system in SYSTEMS:
                runs = [one[system] for one in found]
                record = {"kind": "graph_host_cost", "system": system, "params": params}
                records.append(record | summary(runs) | {"loss": runs[0]["loss"]})
                print(records[-1], flush=True)
    if args.out:
        append(args.out, machine_record(), *records)


if __name__ == "__main__":
    main()
