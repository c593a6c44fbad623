# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
r"""Measures links and computing on the ranks, and writes a cluster file for the planner.

torchrun --nnodes 2 --nproc-per-node 8 [...] -m megatron_asynchzp.commands.calibrate \
        --tflops 989 --memory-gib 80 --output mine.toml
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from megatron_asynchzp.errors import OneLineParser, no_file_at
from megatron_asynchzp.planner.cluster import Cluster, Device, Link
from megatron_asynchzp.planner.cluster_files import cluster_toml

_SIZES = (2**16, 2**20, 2**24, 2**28)  # bytes of the whole tensor


def main(argv: list[str]) -> int:
    parser = OneLineParser(
        prog="asynchzp calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="TOML", help="the cluster file")
    add("--tflops", type=float, required=True, help="dense peak of a device in bf16")
    add("--memory-gib", type=float, required=True, help="memory of a device")
    add("--memory-gb-s", type=float, default=2000.0, help="speed of its memory")
    add("--cards", type=int, help="network cards of a node (default: one for each rank)")
    add("--use-nccl-ub", action="store_true", help="gather within a node into registered memory")
    add("--largest-mib", type=int, default=256, help="largest tensor to gather (default: 256)")
    asked = parser.parse_args(argv)
    for name in ("tflops", "memory_gib", "memory_gb_s", "largest_mib"):
        if not getattr(asked, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(asked, name)}: give one above 0")
    if "RANK" not in os.environ:
        parser.error(
            "start it with torchrun on the nodes to measure: torchrun --nproc-per-node 8 -m "
            "megatron_asynchzp.commands.calibrate --tflops 989 --memory-gib 80 --output mine.toml"
        )
    if fault := no_file_at(asked.output):
        parser.error(f"--output {asked.output}: {fault}")
    # Only now: --help and a wrong flag need no torch.
    import torch
    import torch.distributed as dist

    from megatron_asynchzp.commands.calibration import calibrate

    has_device = torch.accelerator.is_available()
    local = int(os.environ["LOCAL_RANK"])
    if has_device:
        torch.accelerator.set_device_index(local)
    dist.init_process_group(None if has_device else "gloo")
    try:
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = dist.get_world_size() // per_node
        blank = Link(1.0)
        cluster = Cluster(
            asked.output.stem,
            nodes,
            per_node,
            Device(asked.tflops, asked.memory_gib, 0.5, asked.memory_gb_s, 0.08 * asked.memory_gib),
            blank,
            replace(blank, cards=asked.cards or per_node),
            runs_ahead=has_device,
            source="megatron_asynchzp.commands.calibrate",
        )
        sizes = [size for size in _SIZES if size <= 2**20 * asked.largest_mib]
        measured = calibrate(cluster, sizes, registers=asked.use_nccl_ub)
        if dist.get_rank() == 0:
            for line in measured.doubts:
                print(f"megatron_asynchzp: {asked.output}: {line}", file=sys.stderr)
            device = replace(measured.device, efficiency=min(1.0, measured.device.efficiency))
            asked.output.write_text(cluster_toml(replace(measured, device=device)))
            print(
                f"{asked.output}: {nodes} nodes x {per_node} ranks; set device.efficiency to what "
                "your layers reach, and what was not measured to your own"
            )
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
