# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the other substrate: network namespaces of the kernel as nodes, with shaped links, and a
command run as ranks in them. For confirmation runs.

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
import shutil
import subprocess
import sys

from scripts.testbed.command import RankCommand, count, run_as_ranks, split_command
from scripts.testbed.ranks import Place

_INSIDE = "ASYNCHZP_NETNS_INSIDE"
_PORT = 29511  # the namespaces are new, so it is free
_TOOLS = ("unshare", "ip", "tc", "mount", "sysctl", "taskset")
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class NetnsError(RuntimeError):
    """Namespaces cannot be used here; the message names the reason."""


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


def unavailable() -> str | None:
    """Why namespaces cannot be used on this machine; None where they can."""
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2, util-linux, procps)"
    ended = subprocess.run(
        [*_unshare(), "ip", "link", "add", "test0", "type", "veth"], capture_output=True, text=True
    )
    return f"unshare or veth is refused: {ended.stderr.strip()}" if ended.returncode else None


def _unshare() -> list[str]:
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return command if os.geteuid() == 0 else [*command, "--user", "--map-root-user"]


def main() -> None:
    args = parse_args(sys.argv[1:])
    if not os.environ.get(_INSIDE):
        if (reason := unavailable()) is not None:
            sys.exit(f"netns: {reason}; use the modelled network instead (docs/testbed.md)")
        inside = [*_unshare(), sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        os.execvpe(inside[0], inside, os.environ | {_INSIDE: "1"})
    try:
        make_links(args)
        commands = [rank_command(args, rank) for rank in range(args.nodes * args.ranks)]
        sys.exit(run_as_ranks("netns", commands, args.timeout))
    except NetnsError as error:
        sys.exit(f"netns: {error}")


def make_links(args: argparse.Namespace) -> None:
    """Namespaces, bridge, veth pairs and their shaping; once, inside the private namespaces."""
    _run("mount -t tmpfs tmpfs /run")  # where `ip netns` keeps its names
    _run("mkdir /run/netns")
    _run("ip link set lo up")
    _run("ip netns add switch")
    _run("ip -n switch link add bridge type bridge")
    _run("ip -n switch link set bridge up")
    for node in range(args.nodes):
        name, port = f"node{node}", f"port{node}"
        _run(f"ip netns add {name}")
        _run(f"ip link add {port} netns switch type veth peer name eth0 netns {name}")
        _run(f"ip -n {name} address add {_address(node)}/24 dev eth0")
        _run(f"ip -n {name} link set lo up")
        _run(f"ip -n {name} link set eth0 up")
        _run(f"ip -n switch link set {port} master bridge up")
        _tune(name)
        # A queue shapes what leaves it: upload at the node, download at the switch.
        _run(f"ip netns exec {name} tc qdisc replace dev eth0 root {_bucket(args.inter)}")
        _run(f"ip netns exec switch tc qdisc replace dev {port} root {_bucket(args.inter)}")
        if args.intra:
            _run(f"ip netns exec {name} tc qdisc replace dev lo root {_bucket(args.intra)}")


def _tune(name: str) -> None:
    """TCP that fills a shaped link; a kernel without one of the settings is used as it is."""
    for setting in (
        "net.ipv4.tcp_congestion_control=cubic",  # BBR measures the bucket, not the rate
        "net.ipv4.tcp_no_metrics_save=1",
        "net.ipv4.tcp_slow_start_after_idle=0",
        "net.ipv4.tcp_wmem=4096 1048576 16777216",
        "net.ipv4.tcp_rmem=4096 1048576 16777216",
    ):
        command = ["ip", "netns", "exec", name, "sysctl", "-qw", setting]
        subprocess.run(command, capture_output=True)


def _bucket(rate: str) -> str:
    """tbf of a millisecond's depth, and no less than one offloaded packet (64 KiB)."""
    unit = rate[-4:]
    burst = max(70_000, int(float(rate[:-4]) * _RATE_UNITS[unit] / 8 * 1e-3))
    return f"tbf rate {rate} burst {burst} latency 30ms"


def _address(node: int) -> str:
    return f"10.99.0.{node + 1}"


def _run(command: str) -> None:
    ended = subprocess.run(command.split(), capture_output=True, text=True)
    if ended.returncode:
        raise NetnsError(f"`{command}`: {ended.stderr.strip()}")


def rank_command(args: argparse.Namespace, rank: int) -> RankCommand:
    """The command in the namespace of the rank's node, with torchrun's environment."""
    place = Place(rank, args.nodes * args.ranks, args.ranks, _PORT)
    env = place.environment() | {
        "MASTER_ADDR": _address(0),
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
