# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that could never meet are told before torchrun waits for them."""

import socket
import time
from collections.abc import Iterator

import pytest

from megatron_asynchzp.commands import meeting, torchrun
from megatron_asynchzp.commands.meeting import torchrun_options
from megatron_asynchzp.errors import ConfigurationError


def check_meeting(words: list[str]) -> None:
    meeting.check_meeting(torchrun_options(words))


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "options, line",
    [
        (
            "--nnodes 2 --master-addr no.such.invalid",
            "--master-addr no.such.invalid: no machine of",
        ),
        ("--master_addr=no.such.invalid", "--master-addr no.such.invalid: no machine of that name"),
        ("--node-rank 1 --nnodes 2 --master-addr no.such.invalid", "no machine of that name is"),
        ("--rdzv-backend c10d --rdzv-endpoint no.such.invalid:2000", "--rdzv-endpoint no.such.in"),
        ("--rdzv-backend c10d --rdzv_endpoint no.such.invalid", "give the name or address of the"),
        ("--master-port 70000", "--master-addr 127.0.0.1:70000: 70000 is no port"),
        ("--master-port 65536", "--master-addr 127.0.0.1:65536: 65536 is no port"),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:-1", "localhost:-1: -1 is no port"),
        ("--master-port http", "http is no port"),
        ("--nproc-per-node xpu", "--nproc-per-node xpu: Xpu is not available. Give a number of"),
    ],
)
def test_a_place_that_cannot_be_is_refused_in_one_line(options, line):
    with pytest.raises(ConfigurationError) as refused:
        check_meeting(options.split())
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_the_last_port_is_a_port():
    check_meeting(["--master-port", "65535", "--node-rank", "1"])


@pytest.mark.parametrize("options", ["", "--master-addr localhost", "--rdzv-endpoint 127.0.0.1:{}"])
def test_a_port_in_use_is_refused_where_the_first_node_would_listen(used_port, options):
    words = options.format(used_port).split()
    if "--rdzv-endpoint" not in words:
        words += ["--master-port", str(used_port)]
    with pytest.raises(ConfigurationError, match=f"port {used_port} is in use on this machine"):
        check_meeting(words)
    check_meeting([*words, "--node-rank", "1"])
    check_meeting([*words, "--standalone"])
    # A store that is there already is what such a rendezvous looks for.
    elastic = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{used_port}"]
    check_meeting(elastic)


@pytest.mark.parametrize("host", ["192.0.2.1", "machine"])
def test_an_address_at_which_this_machine_is_not_called_is_refused_on_the_first_node_alone(
    monkeypatch, host
):
    monkeypatch.setattr(meeting, "_ANSWERS_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:  # answers in place of this machine
        there = elsewhere.getsockname()
        look_up, reach = socket.getaddrinfo, socket.create_connection
        known = lambda _, *more, **named: look_up("127.0.0.1", *more, **named)  # noqa: E731
        monkeypatch.setattr(meeting.socket, "getaddrinfo", known)

        def call(place, timeout):
            if place[0] == "machine":
                return reach(there, timeout)
            raise TimeoutError("timed out")

        monkeypatch.setattr(meeting.socket, "create_connection", call)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        other = ["--nnodes", "2", "--master-addr", host, "--master-port", str(port)]
        with pytest.raises(ConfigurationError, match="does not arrive here .timed out.; give the"):
            check_meeting(other)
        check_meeting([*other, "--node-rank", "1"])


def test_a_free_port_of_this_machine_is_left_free(used_port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    check_meeting(["--master-port", str(port)])
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_node_says_now_and_then_what_it_waits_for_until_it_has_started_a_rank(
    monkeypatch, capfd, num_before
):
    monkeypatch.setattr(torchrun, "_MISSED_AFTER_S", 0.02)
    monkeypatch.setattr(torchrun, "_MISSED_AGAIN_S", 0.02)
    ranks: dict = dict.fromkeys(range(num_before))
    torchrun.watch_meeting(ranks, "node0:29500")
    said, deadline = "", time.monotonic() + (10 if not num_before else 0.3)
    while said.count("node0:29500") < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
        said += capfd.readouterr().err
    ranks[0] = None
    time.sleep(0.1)
    capfd.readouterr()
    time.sleep(0.2)
    assert capfd.readouterr().err == ""
    assert (said.count("for all nodes to meet at node0:29500;") >= 2) == (num_before == 0)
