# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns whether torchrun's ranks can meet, which torchrun itself finds out late, with tracebacks."""

import errno
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

from megatron_asynchzp.errors import raise_first

_PORT = 29400  # of a rendezvous that names none
_ANSWERS_WITHIN_S = 5.0  # a call from this machine to itself


def torchrun_options(options: Sequence[str]) -> Namespace:
    """Parse those of torchrun's options that the launcher reads, as words."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in (("nnodes", "1"), ("nproc-per-node", "1"), ("max-restarts", "0"),
                          ("node-rank", "0"), ("master-addr", "127.0.0.1"),
                          ("master-port", "29500"), ("rdzv-backend", "static"),
                          ("rdzv-endpoint", "")):  # fmt: skip
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", default=default)
    parser.add_argument("--standalone", action="store_true")
    return parser.parse_known_args(list(options))[0]


def check_meeting(known: Namespace) -> None:
    """Refuse ranks that cannot meet by torchrun_options: host, port, address and devices."""
    raise_first(_faults_of_devices(known.nproc_per_node))
    raise_first(() if known.standalone else _faults_of_meeting(known))


def _faults_of_meeting(known: Namespace) -> Iterator[str]:
    is_static = known.rdzv_backend == "static"
    endpoint, flag = known.rdzv_endpoint, "--rdzv-endpoint"
    if is_static and not endpoint:
        endpoint, flag = f"{known.master_addr}:{known.master_port}", "--master-addr"
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", str(_PORT))
    if not (port.isdecimal() and int(port) < 2**16):
        yield f"{flag} {endpoint}: {port} is no port; give HOST and PORT"
    try:
        socket.getaddrinfo(host or "localhost", int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        yield (
            f"{flag} {host}: no machine of that name is known here ({error.strerror}); give the "
            "name or address of the node where the ranks meet"
        )
    if is_static and known.node_rank == "0":
        for fault in _faults_of_call(host or "localhost", int(port)):
            yield f"{flag} {host}: {fault}"


def _faults_of_call(host: str, port: int) -> Iterator[str]:
    """Listen as the first node will, and call the address as its ranks will."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listening = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield (
                f"port {port} is in use on this machine; give another --master-port, or on one "
                "node --standalone"
            )
        return
    listening.settimeout(_ANSWERS_WITHIN_S)
    try:
        with listening, socket.create_connection((host, port), _ANSWERS_WITHIN_S):
            listening.accept()[0].close()
    except OSError as error:
        yield (
            f"the first node waits on this machine, and a call to port {port} there does not "
            f"arrive here ({error.strerror or error}); give the name or an address of this machine"
        )


def _faults_of_devices(word: str) -> Iterator[str]:
    if word in ("gpu", "xpu"):
        from torch.distributed.run import determine_local_world_size

        try:
            determine_local_world_size(word)
        except ValueError as error:
            yield f"--nproc-per-node {word}: {error} Give a number of ranks, or cpu"
