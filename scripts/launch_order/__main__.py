# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Looks for a circle in what a run launched on NCCL: one dump of torch's flight recorder per rank,
in the order of the ranks.

    TORCH_FR_BUFFER_SIZE=100000 torchrun ...   # after the same step each rank writes to a file:
    torch._C._distributed_c10d._dump_nccl_trace()
    python -m scripts.launch_order rank*.pickle --queues 1 32 --places 1 4

Exit status: 0 without a circle, 1 with one, 2 for dumps that cannot be searched.
"""

import argparse
import pickle
import sys
from pathlib import Path

from megatron_asynchzp.errors import ConfigurationError
from scripts.launch_order.interleavings import Device, search
from scripts.launch_order.record import Meeting, launches_in, meetings_of, unmet_of


def read(paths: list[Path]) -> list[list[Meeting]]:
    """Raises ConfigurationError for what is no dump, and for dumps that do not fit together."""
    orders: list[list[Meeting]] = []
    for path in paths:
        try:
            dump = pickle.loads(path.read_bytes())
            entries = dump["entries"]
            orders.append(meetings_of(launches_in(dump)))
        except (
            OSError,
            pickle.UnpicklingError,
            EOFError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            raise ConfigurationError(
                f"{path}: no dump of torch's flight recorder for NCCL ({type(error).__name__})"
            ) from error
        if entries and entries[0]["record_id"]:
            raise ConfigurationError(
                f"{path}: the first {entries[0]['record_id']} launches are lost; run with a larger "
                "TORCH_FR_BUFFER_SIZE"
            )
    if unmet := unmet_of(orders):
        raise ConfigurationError(
            f"{unmet[0]} is not in the dumps of all its ranks, nor are {len(unmet) - 1} others; "
            "give the dumps of all ranks, in their order, each written after the same step"
        )
    return orders


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.launch_order", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("dumps", type=Path, nargs="+", metavar="DUMP")
    parser.add_argument("--queues", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--places", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--max-states", type=int, default=1_000_000)
    asked = parser.parse_args(argv)
    try:
        orders = read(asked.dumps)
    except ConfigurationError as error:
        print(f"launch_order: {error}", file=sys.stderr)
        return 2
    has_circle = False
    for in_host_order in (True, False):
        print(f"NCCL_LAUNCH_ORDER_IMPLICIT={int(in_host_order)}")
        for num_queues in asked.queues:
            for num_places in asked.places:
                device = Device(num_queues, num_places, in_host_order)
                found = search(orders, device, asked.max_states)
                outcome = "a circle" if found.circle else "no circle"
                if not found.circle and not found.is_all:
                    outcome += " so far"
                of = f"{num_queues} queues, {num_places} places"
                print(f"  {of}: {outcome}, {found.num_states:,} states", flush=True)
                for line in found.circle:
                    print(f"      {line}")
                has_circle |= bool(found.circle)
    return int(has_circle)


if __name__ == "__main__":
    sys.exit(main())
