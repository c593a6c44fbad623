# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the other substrate: a command run as ranks in network namespaces of the kernel with shaped
links. For confirmation runs.

    python -m scripts.testbed.netns --nodes 2 --inter 1gbit -- python program.py ...

    namespace node0: rank 0, rank 1 (over its lo)  eth0 --+
                                                          +-- bridge (namespace switch)
    namespace node1: rank 2, rank 3 (over its lo)  eth0 --+      each link shaped, both ways (tbf)

Everything lives below one `unshare` (network, mount and process namespaces): when the launcher
ends, by whatever signal, the kernel removes namespaces, links and ranks. Stay at or below 1 Gbit/s
and use messages of 1 MB and more: above and below the shaping is not accurate.
"""

import argparse
import os
import re
import sys

from scripts.testbed.command import RankCommand, count, run_as_ranks, split_command
from scripts.testbed.links import Links, LinksError, address, unavailable, unshare
from scripts.testbed.ranks import RankPlace

_INSIDE = "ASYNCHZP_NETNS_INSIDE"
_PORT = 29511  # the namespaces are new, so it is free


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The options, and the ranks' command as `command`."""
    parser = argparse.ArgumentParser(
        prog="netns",
        usage="%(prog)s [options] -- command ...",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--nodes", type=count, default=2)
    parser.add_argument("--ranks", type=count, default=2, help="ranks per node")
    parser.add_argument("--inter", type=_rate, default="1gbit", help="each node's link")
    parser.add_argument("--intra", type=_rate, help="among a node's ranks; default: not shaped")
    parser.add_argument("--timeout", type=float, default=170.0, help="seconds for the command")
    parser.add_argument("--no-pin", action="store_true", help="let the kernel place the ranks")
    args, args.command = split_command(parser, argv)
    if args.nodes > 250:
        parser.error(f"--nodes {args.nodes}: at the most 250")
    return args


def _rate(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?(kbit|mbit|gbit)", text):
        raise argparse.ArgumentTypeError(f"{text} is not a rate such as 500mbit or 1gbit")
    return text


def main() -> None:
    args = parse_args(sys.argv[1:])
    if not os.environ.get(_INSIDE):
        if (reason := unavailable()) is not None:
            sys.exit(f"netns: {reason}; use the modelled network instead (docs/testbed.md)")
        inside = [*unshare(), sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        os.execvpe(inside[0], inside, os.environ | {_INSIDE: "1"})
    try:
        Links(args.nodes, args.inter, args.intra)
        commands = [rank_command(args, rank) for rank in range(args.nodes * args.ranks)]
        sys.exit(run_as_ranks("netns", commands, args.timeout))
    except LinksError as error:
        sys.exit(f"netns: {error}")


def rank_command(args: argparse.Namespace, rank: int) -> RankCommand:
    """The command in the namespace of the rank's node, with torchrun's environment."""
    place = RankPlace(rank, args.nodes * args.ranks, args.ranks, _PORT)
    env = place.environment() | {
        "MASTER_ADDR": address(0),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "ASYNCHZP_NETNS": f"{args.inter} {args.intra or ''}".strip(),
    }
    # Ranks that wander between cores measure the scheduler.
    pin = [] if args.no_pin else ["taskset", "-c", str(rank % len(os.sched_getaffinity(0)))]
    node = rank // args.ranks
    return RankCommand(["ip", "netns", "exec", f"node{node}", *pin, *args.command], env)


if __name__ == "__main__":
    main()
