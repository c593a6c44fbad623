# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a Python script on an emulated cluster, with a modelled network in place of gloo.

python -m scripts.testbed --nodes 2 --ranks 2 --profile fast -- SCRIPT ...
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.testbed.command import RankCommand, count, run_as_ranks, split_command
from scripts.testbed.profile import PROFILES, named_profile, profile_to_env
from scripts.testbed.rank import COUNTS, STREAMS
from scripts.testbed.ranks import RankPlace, new_store


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The options, with `profile` as a NetworkProfile, and the ranks' script as `command`."""
    parser = argparse.ArgumentParser(
        prog="testbed",
        usage="python -m scripts.testbed [options] -- SCRIPT ... (or -m MODULE ...)",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="The status is that of the first rank that fails. See docs/testbed.md.",
    )
    parser.add_argument("--nodes", type=count, default=2, help="default: 2")
    parser.add_argument("--ranks", type=count, default=2, help="ranks per node; default: 2")
    parser.add_argument(
        "--profile",
        default="slow-between-nodes",
        metavar="NAME",
        help=f"speed of the network: {', '.join(PROFILES)}; default: slow-between-nodes",
    )
    for link, what in (("inter", "of a node's link"), ("intra", "inside a node")):
        parser.add_argument(
            f"--{link}-gbit", type=float, metavar="N", help=f"Gbit/s {what}; default: the profile's"
        )
    parser.add_argument(
        "--streams",
        action="store_true",
        help="give torch.cpu streams, for what overlaps by them (FSDP2)",
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds; default: no limit")
    args, args.command = split_command(parser, argv)
    if Path(args.command[0]).name.startswith("python"):
        del args.command[0]
    if args.command[:1] == ["-m"]:
        if len(args.command) < 2:
            parser.error("-m: no module given")
    elif not args.command or not Path(args.command[0]).is_file():
        parser.error(f"{' '.join(args.command[:1])}: no such Python script (or give -m MODULE)")
    changes = {f"{link}_gbit": getattr(args, f"{link}_gbit") for link in ("inter", "intra")}
    try:
        profile = named_profile(
            args.profile, **{key: value for key, value in changes.items() if value is not None}
        )
    except ValueError as error:
        parser.error(str(error))
    args.profile = replace(profile, ranks_per_node=args.ranks)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    store = new_store()  # served here, as torchrun does: no rank can find its port taken
    with TemporaryDirectory(prefix="testbed.") as folder:
        env = profile_to_env(args.profile) | {
            COUNTS: folder,
            STREAMS: "1" if args.streams else "",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # ranks share the cores
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        rank_of = [sys.executable, "-m", "scripts.testbed.rank", *args.command]
        world_size = args.nodes * args.ranks
        places = [RankPlace(rank, world_size, args.ranks, store.port) for rank in range(world_size)]
        commands = [RankCommand(rank_of, env | place.environment()) for place in places]
        status = run_as_ranks("testbed", commands, args.timeout)
        if status == 0:
            print(*_sent(Path(folder), args), sep="\n", file=sys.stderr)
    return status


def _sent(folder: Path, args: argparse.Namespace) -> list[str]:
    """What each node has sent. A script that ends by os._exit leaves no counts."""
    lines = []
    for node in range(args.nodes):
        ranks = range(node * args.ranks, (node + 1) * args.ranks)
        files = [folder / f"{rank}.json" for rank in ranks]
        if all(file.exists() for file in files):
            counts = (json.loads(file.read_text()) for file in files)
            operations, wire_nbytes, node_nbytes = map(sum, zip(*counts))
            lines.append(
                f"testbed: node {node} sent {1e-6 * node_nbytes:.2f} MB to other nodes, "
                f"{1e-6 * wire_nbytes:.2f} MB in all, in {operations} operations of its ranks"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
