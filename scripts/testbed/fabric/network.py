# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what all groups of one process share: the profile, the modelled clocks, the counters."""

import threading

import torch
from torch.distributed.distributed_c10d import Store

from scripts.testbed.counters import Account, Counters
from scripts.testbed.fabric.nic import NicClocks, sleep_until
from scripts.testbed.fabric.wire import COLLECTIVE, Message, Wire
from scripts.testbed.profile import NetworkProfile


class Network:
    """The modelled network, as one process sees it."""

    def __init__(self, profile: NetworkProfile):
        self.profile = profile
        self.counters = Counters()
        self._mutex = threading.Lock()
        self._clocks: NicClocks | None = None

    def clocks(self, store: Store) -> NicClocks | None:
        """The clocks of the run, from its first group on, or None if nothing is modelled."""
        with self._mutex:
            if self._clocks is None and self.profile.is_modelled:
                self._clocks = NicClocks.shared(self.profile, store)
            return self._clocks


class Link:
    """One operation's way to the other ranks of its group.

    It counts, and lets the modelled time pass. `nodes`: the node of each group rank; `label`: what
    the operation is, equal on all its ranks.
    """

    def __init__(
        self,
        wire: Wire,
        clocks: NicClocks | None,
        nodes: list[int],
        account: Account,
        label: str,
        channel: int = COLLECTIVE,
    ):
        self.rank, self.size = wire.rank, wire.size
        self.account, self.label = account, label
        self.wire_nbytes = self.node_nbytes = 0
        self._wire, self._clocks, self._nodes, self._channel = wire, clocks, nodes, channel

    def exchange(
        self,
        send: torch.Tensor | None = None,
        to: int = 0,
        receive: torch.Tensor | None = None,
        source: int = 0,
    ) -> None:
        """Send and receive at once; return when both are through, also by the model.

        The payload goes at once: its arrival is what the model delays.
        """
        outgoing = incoming = None
        done = 0.0
        if send is not None:
            outgoing = Message(to, send, self.label)
            done = self._leave(outgoing)
        if receive is not None:
            incoming = Message(source, receive, self.label)
        self._wire.exchange(outgoing, incoming, self._channel)
        if incoming is not None:
            done = max(done, incoming.arrival)
        sleep_until(done)

    def _leave(self, message: Message) -> float:
        """Count the message and give it its modelled times; when it has left."""
        here, there = self._nodes[self.rank], self._nodes[message.peer]
        self.wire_nbytes += message.nbytes
        self.node_nbytes += message.nbytes if here != there else 0
        if self._clocks is None:
            return 0.0
        left, message.arrival = self._clocks.reserve(here, there, message.nbytes)
        return left
