# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Times one training step of the default schedule on CUDA and of FSDP2, by the emulated clock.

It varies the number of hardware queues, NCCL's implicit launch order, and whether the host waits
for each step. It prints a table; --out writes JSON lines.

    python -m scripts.bench.bench_device --out runs/device.jsonl

Computation and collectives take stated times and the host takes none, so the figures are the same
in every run and on a busy machine.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from itertools import product
from math import isfinite
from pathlib import Path

from scripts.bench.device_steps import BESIDE_TP, CONTENDERS, MEGATRON_FSDP_2, measure
from scripts.report.device_table import device_table
from scripts.report.records import append
from scripts.testbed.contenders.delayed_model import ModelSize
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.differences import worst_difference
from scripts.testbed.machine import machine_record
from scripts.testbed.profile import NetworkProfile

SHARDED = ("main-thread", "hsdp", MEGATRON_FSDP_2)
QUEUES = ("1", "8", "32")
# The peers order a stream when they reuse what they freed on it: by then, not before, it is lost.
FREED_LATE = {"ASYNCHZP_DEVICE_FREES": "late"}
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Cluster:
    """Parameters and gradients are sharded over the ranks of a node, optimizer states over all."""

    nodes: int
    ranks_per_node: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.ranks_per_node, self.ranks_per_node, self.nodes * self.ranks_per_node

    def sizes_of(self, contender: str) -> tuple[int, int, int]:
        """Return the sizes; with tensor parallelism in a node they are the number of nodes."""
        return (self.nodes, self.nodes, self.nodes) if contender == BESIDE_TP else self.sizes

    def network(self, size: ModelSize, comm: float) -> NetworkProfile:
        """Return a network on which gathering a block takes `comm` times as long as its forward.

        A gather within a node brings a block, one over the nodes a rank's shard of it.
        """
        bits_per_s = 8 * size.block_nbytes / (1e-3 * comm * size.block_ms)
        in_node, between = (self.ranks_per_node - 1), (self.nodes - 1) / self.nodes
        return NetworkProfile(
            "device",
            inter_gbit=1e-9 * bits_per_s * (between or 1),
            intra_gbit=1e-9 * bits_per_s * in_node,
            ranks_per_node=self.ranks_per_node,
        )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    records: list[dict] = []
    if args.out:
        append(args.out, machine_record())
    with DeviceWorlds(["scripts.testbed.contenders.systems"]) as worlds:
        for shape, queues, in_order in product(args.clusters, args.queues, (False, True)):
            cluster = Cluster(*shape)
            size = ModelSize(args.hidden, args.blocks, 2, args.block_ms, args.micro_batches)
            env = {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
            env |= {"NCCL_LAUNCH_ORDER_IMPLICIT": str(int(in_order))}
            env |= FREED_LATE
            network, world_size = cluster.network(size, args.comm), cluster.sizes[2]
            given = (shape, size, network, args.contenders)
            # Megatron-FSDP v2's HSDP reuses memory that an addition may still write.
            watches = MEGATRON_FSDP_2 not in args.contenders
            seen = worlds.run(
                measure, world_size, *given, env=env, timeout_s=args.time_limit, watches=watches
            )[0]
            expected = next(iter(seen.values()))["losses"]
            # fmt: off
            records += [{
                "kind": "step", "nodes": cluster.nodes, "sizes": cluster.sizes_of(name),
                "queues": int(queues), "in_order": in_order, "synchronizes": synchronizes,
                "comm": args.comm, "model": asdict(size), "contender": name + args.label,
                **result, "losses": [loss if isfinite(loss) else None for loss in result["losses"]],
                "is_right": worst_difference(result["losses"], expected) <= LOSS_TOLERANCE,
            } for (name, synchronizes), result in seen.items()]
            # fmt: on
            print(device_table(records[-len(seen) :]), flush=True)
            if args.out:
                append(args.out, *records[-len(seen) :])
    wrong = [record["contender"] for record in records if not record["is_right"]]
    if wrong:
        names = ", ".join(dict.fromkeys(wrong))
        print(f"{names}: other losses than {args.contenders[0]}, in {len(wrong)} settings")
    # Those of Megatron-FSDP v2 are a result, and the table says so.
    if set(wrong) - {MEGATRON_FSDP_2 + args.label}:
        sys.exit(1)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--clusters", type=_shape, nargs="+", default=[(1, 4), (2, 2)], metavar="NODESxRANKS"
    )
    parser.add_argument("--queues", nargs="+", default=QUEUES)
    parser.add_argument("--contenders", nargs="+", default=SHARDED, choices=CONTENDERS)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--block-ms", type=float, default=10.0, help="stated time of a forward")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--comm", type=float, default=0.8, help="a gather's time / a forward's")
    parser.add_argument("--label", default="", help="put behind names: of another tree, say")
    parser.add_argument("--time-limit", type=float, default=200.0, help="seconds per setting")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    return parser.parse_args(argv)


def _shape(text: str) -> tuple[int, int]:
    nodes, ranks = text.split("x")
    return int(nodes), int(ranks)


if __name__ == "__main__":
    main()
