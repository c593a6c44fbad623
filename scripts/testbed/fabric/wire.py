# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the sockets between the ranks of one group and how messages travel over them.

Plain TCP instead of gloo's send and receive, for three reasons: a rank that fails closes its
sockets, so its peers fail at once instead of at a timeout; every message names its operation,
so a receiver notices operations that differ; and nothing but payload is as large as it.
"""

import ctypes
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field

import torch
from torch.distributed.distributed_c10d import Store

_LABEL_NBYTES = 120
_HEADER = struct.Struct(f"!dQ{_LABEL_NBYTES}s")  # modelled arrival, payload bytes, label
_HELLO = struct.Struct("!32sIB")  # secret of the group, rank, channel
CHANNELS = COLLECTIVE, POINT_TO_POINT = 0, 1


class FabricError(RuntimeError):
    """An operation of the fabric failed here or on another rank."""


@dataclass
class Message:
    """What travels from one rank to another.

    tensor: contiguous, read or written in place; label: what it belongs to, compared by the
    receiver; arrival: the moment the model gives it, set by the sender.
    """

    peer: int
    tensor: torch.Tensor
    label: str
    arrival: float = 0.0
    _parts: list[memoryview] = field(default_factory=list)
    _header: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def _payload(self) -> memoryview:
        # Not through numpy: it knows few dtypes, and takes from the storage that it can be resized.
        if self.nbytes == 0:
            return memoryview(b"")
        buffer = (ctypes.c_char * self.nbytes).from_address(self.tensor.data_ptr())
        return memoryview(buffer).cast("B")

    def start_sending(self) -> None:
        label = self.label.encode()[:_LABEL_NBYTES]
        _HEADER.pack_into(self._header, 0, self.arrival, self.nbytes, label)
        self._parts = [memoryview(self._header), self._payload()]

    def start_receiving(self) -> None:
        self._parts = [memoryview(self._header)]

    def check_header(self) -> None:
        """Refuse an unexpected message before its bytes are written to the tensor."""
        self.arrival, nbytes, label = _HEADER.unpack(self._header)
        sent, mine = label.rstrip(b"\0"), self.label.encode()[:_LABEL_NBYTES]
        if sent != mine:
            raise FabricError(
                f"group rank {self.peer} is at [{sent.decode(errors='replace')}], this rank at "
                f"[{self.label}]: all ranks of a group must issue the same operations, with the "
                "same sizes, in the same order"
            )
        if nbytes != self.nbytes:
            raise FabricError(
                f"[{self.label}]: group rank {self.peer} sends {nbytes} bytes, this rank expects "
                f"{self.nbytes}: uneven sizes"
            )
        self._parts = [self._payload()]


class Wire:
    """The connections of one rank to the others of its group; made by all of them together."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float):
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._sockets: dict[tuple[int, int], socket.socket] = {}
        if size > 1:
            self._connect(store)

    def _connect(self, store: Store) -> None:
        """Full mesh: connect to the ranks below, accept those above; the backlog holds them all."""
        own_address = _own_address()
        if self.rank == 0:
            store.set("secret", secrets.token_hex(16))
        with socket.create_server((own_address, 0), backlog=len(CHANNELS) * self.size) as server:
            server.settimeout(self._timeout_s)
            store.set(f"address/{self.rank}", f"{own_address} {server.getsockname()[1]}")
            secret = store.get("secret")
            for peer in range(self.rank):
                address, port = store.get(f"address/{peer}").decode().split()
                for channel in CHANNELS:
                    link = socket.create_connection((address, int(port)), self._timeout_s)
                    link.sendall(_HELLO.pack(secret, self.rank, channel))
                    self._sockets[peer, channel] = link
            while len(self._sockets) < len(CHANNELS) * (self.size - 1):
                link, _ = server.accept()
                link.settimeout(self._timeout_s)
                sent, peer, channel = _HELLO.unpack(_receive_exactly(link, _HELLO.size))
                if sent != secret:
                    link.close()  # a stranger
                    continue
                self._sockets[peer, channel] = link
        for link in self._sockets.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)

    def exchange(
        self, send: Message | None, receive: Message | None, channel: int = COLLECTIVE
    ) -> None:
        """Send and receive at the same time; return when both are through.

        Raises FabricError for a peer that is gone, sends something else or nothing in time.
        """
        deadline = time.monotonic() + self._timeout_s
        if send is not None:
            send.start_sending()
        if receive is not None:
            receive.start_receiving()
        try:
            while send is not None or receive is not None:
                if send is not None and self._push(send, channel):
                    send = None
                if receive is not None and self._pull(receive, channel):
                    receive = None
                if send is not None or receive is not None:
                    self._wait_ready(send, receive, channel, deadline)
        except OSError as error:
            message = _waited_for(send, receive)
            raise FabricError(
                f"[{message.label}]: lost group rank {message.peer} ({error or 'closed'}): it "
                "failed or ended; its own error has the reason"
            ) from error

    def _push(self, message: Message, channel: int) -> bool:
        link = self._sockets[message.peer, channel]
        while message._parts:
            if len(message._parts[0]):
                try:
                    sent = link.send(message._parts[0])
                except BlockingIOError:
                    return False
                message._parts[0] = message._parts[0][sent:]
            if not len(message._parts[0]):
                message._parts.pop(0)
        return True

    def _pull(self, message: Message, channel: int) -> bool:
        link = self._sockets[message.peer, channel]
        is_header = message._parts and message._parts[0].obj is message._header
        while message._parts:
            if len(message._parts[0]):
                try:
                    received = link.recv_into(message._parts[0])
                except BlockingIOError:
                    return False
                if received == 0:
                    raise ConnectionError("closed")
                message._parts[0] = message._parts[0][received:]
            if not len(message._parts[0]):
                message._parts.pop(0)
                if is_header:
                    message.check_header()
                    is_header = False
        return True

    def _wait_ready(
        self, send: Message | None, receive: Message | None, channel: int, deadline: float
    ) -> None:
        interest: dict[int, int] = {}
        for message, event in ((send, select.POLLOUT), (receive, select.POLLIN)):
            if message is not None:
                number = self._sockets[message.peer, channel].fileno()
                if number < 0:
                    raise ConnectionError("closed by this rank")
                interest[number] = interest.get(number, 0) | event
        poll = select.poll()
        for number, events in interest.items():
            poll.register(number, events)
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(1e3 * left_s):
            message = _waited_for(send, receive)
            raise FabricError(
                f"[{message.label}]: no progress with group rank {message.peer} within "
                f"{self._timeout_s:.0f} s"
            )

    def close(self) -> None:
        """End all connections: operations in flight fail, here and at the peers, at once."""
        for link in self._sockets.values():
            try:
                link.shutdown(socket.SHUT_RDWR)  # wakes a thread that polls; close would not
            except OSError:
                pass

    def __del__(self):
        for link in getattr(self, "_sockets", {}).values():
            link.close()


def _waited_for(send: Message | None, receive: Message | None) -> Message:
    """The message that an error names, of those in flight."""
    message = receive or send
    assert message is not None
    return message


def _receive_exactly(link: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        piece = link.recv(nbytes - len(received))
        if not piece:
            raise FabricError("a connection ended while the group was being made")
        received += piece
    return received


def _own_address() -> str:
    """This rank's address as the others see it: the one it would use to reach the master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # A datagram socket that connects sends nothing; port 9 is as good as any.
        probe.connect((os.environ.get("MASTER_ADDR") or "127.0.0.1", 9))
        return probe.getsockname()[0]
