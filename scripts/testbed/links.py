# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns nodes as network namespaces of the kernel, their shaped links, and the faults of a link.

    namespace node0: eth0 --- port0 --+
                                      +-- bridge (namespace switch)
    namespace node1: eth0 --- port1 --+

A queue shapes, or drops, what leaves it: upload at eth0, download at the switch's port. All of it
is made inside private namespaces (`unshare`), and is gone when they are.
"""

import os
import shutil
import subprocess

_TOOLS = ("unshare", "ip", "tc", "mount", "sysctl")
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DROPS_ALL = "blackhole"  # a queue of the kernel


class LinksError(RuntimeError):
    """Namespaces cannot be used here; the message names the reason."""


def unavailable() -> str | None:
    """Say why namespaces cannot be used on this machine; None if they can."""
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2, util-linux, procps)"
    ended = subprocess.run(
        [*unshare(), "ip", "link", "add", "test0", "type", "veth"], capture_output=True, text=True
    )
    return f"unshare or veth is refused: {ended.stderr.strip()}" if ended.returncode else None


def unshare() -> list[str]:
    """The words before a command that runs in namespaces of its own, and ends with its starter."""
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return command if os.geteuid() == 0 else [*command, "--user", "--map-root-user"]


def address(node: int) -> str:
    """Of a node's eth0."""
    return f"10.99.0.{node + 1}"


class Links:
    """The links of `nodes` nodes; making one makes the nodes. Once, inside private namespaces.

    inter: rate of each node's link, such as 500mbit. Raises LinksError.
    """

    def __init__(self, nodes: int, inter: str):
        self.nodes, self.inter = nodes, inter
        _run("mount -t tmpfs tmpfs /run")  # where `ip netns` keeps its names
        _run("mkdir /run/netns")
        _run("ip link set lo up")
        _run("ip netns add switch")
        _run("ip -n switch link add bridge type bridge")
        _run("ip -n switch link set bridge up")
        for node in range(nodes):
            self._make_node(node)

    def _make_node(self, node: int) -> None:
        name, port = f"node{node}", f"port{node}"
        _run(f"ip netns add {name}")
        _run(f"ip link add {port} netns switch type veth peer name eth0 netns {name}")
        _run(f"ip -n {name} address add {address(node)}/24 dev eth0")
        _run(f"ip -n {name} link set lo up")
        _run(f"ip -n {name} link set eth0 up")
        _run(f"ip -n switch link set {port} master bridge up")
        _tune(name)
        self.heal(node)

    def heal(self, node: int) -> None:
        """The node's link is as it was made."""
        _run(f"ip -n switch link set port{node} up")
        self._shape_upload(node, _bucket(self.inter))
        self._shape_download(node, _bucket(self.inter))

    def take_down(self, node: int) -> None:
        """No carrier, as with a cable that was pulled."""
        _run(f"ip -n switch link set port{node} down")

    def stop_upload(self, node: int) -> None:
        """What the node sends is lost; what it is sent arrives."""
        self._shape_upload(node, _DROPS_ALL)

    def stop_download(self, node: int) -> None:
        """What the node is sent is lost; what it sends arrives."""
        self._shape_download(node, _DROPS_ALL)

    def slow_down(self, node: int, rate: str) -> None:
        """Both directions have `rate`."""
        self._shape_upload(node, _bucket(rate))
        self._shape_download(node, _bucket(rate))

    def _shape_upload(self, node: int, queue: str) -> None:
        _run(f"ip netns exec node{node} tc qdisc replace dev eth0 root {queue}")

    def _shape_download(self, node: int, queue: str) -> None:
        _run(f"ip netns exec switch tc qdisc replace dev port{node} root {queue}")


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
    """Return a tbf of a millisecond's depth, and no less than one offloaded packet (64 KiB)."""
    unit = rate[-4:]
    burst = max(70_000, int(float(rate[:-4]) * _RATE_UNITS[unit] / 8 * 1e-3))
    return f"tbf rate {rate} burst {burst} latency 30ms"


def _run(command: str) -> None:
    ended = subprocess.run(command.split(), capture_output=True, text=True)
    if ended.returncode:
        raise LinksError(f"`{command}`: {ended.stderr.strip()}")
