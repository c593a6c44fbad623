# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns one process group's lanes, connections and failure, and what torch asks of any group."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from scripts.testbed.counters import Account, Tally
from scripts.testbed.fabric.lane import FabricWork, Lane
from scripts.testbed.fabric.network import Link, Network
from scripts.testbed.fabric.staging import described, flattened, staged
from scripts.testbed.fabric.wire import COLLECTIVE, POINT_TO_POINT, FabricError, Wire

BACKEND = "fabric"
_JOIN_S = 10.0


class LaneGroup(dist.ProcessGroup):
    """One group: a lane for its collectives, one for each peer and direction of send and receive.

    A failed operation fails the group: its connections end, so no rank waits for what never
    comes, and everything submitted later fails with the first error.

    options: what torch hands to the maker of a backend.
    """

    def __init__(self, options: Any, network: Network):
        rank, size = options.group_rank, options.group_size
        # The constructor for subclasses, which torch's stubs lack.
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._rank, self._size, self._network = rank, size, network
        self._limit_s = options.timeout.total_seconds()
        self.global_ranks = list(options.global_ranks_in_group) or list(range(size))
        self._nodes = [network.profile.node_of(member) for member in self.global_ranks]
        self._name, self._desc = options.group_id, ""
        self._clocks = network.clocks(options.store)
        self._wire = Wire(options.store, rank, size, self._limit_s)
        self._mutex = threading.Lock()
        self._failure: BaseException | None = None
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._num_submitted = 0
        self._coalesced: list[FabricWork] | None = None

    # ---- what torch asks of a group

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._desc)

    def __str__(self) -> str:
        desc = self._desc if self._desc not in ("", "undefined") else self._name
        return f"{desc} {','.join(map(str, self.global_ranks))}"

    # ---- submission

    def _submit(
        self, kind: str, detail: str, results: list, run: Callable[[Link], None]
    ) -> FabricWork:
        """Queue a collective. `detail` and the kind must be equal on all ranks."""
        with self._mutex:  # numbers in the order of the queue
            self._num_submitted += 1
            label = f"{kind} #{self._num_submitted} {detail}"
            link = self._link(kind, label, COLLECTIVE)
            return self._queue(("collectives", 0), link, results, run)

    def _link(self, kind: str, label: str, channel: int) -> Link:
        account = Account(str(self), kind)
        return Link(self._wire, self._clocks, self._nodes, account, label, channel)

    def _queue(
        self, lane_key: tuple[str, int], link: Link, results: list, run: Callable[[Link], None]
    ) -> FabricWork:
        if lane_key not in self._lanes:
            self._lanes[lane_key] = Lane(f"fabric {self} {lane_key[0]}", self._fail)
        work = FabricWork(f"{link.account.kind} of group {self}", results)

        def job() -> None:
            if self._failure is not None:
                raise FabricError(f"the group failed before: {self._failure}")
            begin_s = time.monotonic()
            run(link)
            tally = Tally(1, link.wire_nbytes, link.node_nbytes, time.monotonic() - begin_s)
            self._network.counters.add(link.account, tally)

        self._lanes[lane_key].submit(work, job)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _fail(self, error: BaseException) -> None:
        with self._mutex:
            self._failure = self._failure or error
        self._wire.close()

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> FabricWork:
        """A handle for everything since _start_coalescing; it moves no bytes of its own."""
        works, self._coalesced = self._coalesced or [], None
        joined = FabricWork(f"coalesced operations of group {self}", [])
        # A lane of its own: sends and receives end in no order that another lane could wait for.
        lane = Lane(f"fabric {self} coalesced", lambda error: None)
        lane.submit(joined, lambda: [work.block() for work in works])
        lane.close()
        return joined

    # ---- from rank to rank

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> FabricWork:
        (tensor,) = tensors

        def run(link: Link) -> None:
            link.exchange(flattened(tensor), dst)

        return self._submit_message("send", tensors, dst, tag, run)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> FabricWork:
        (tensor,) = tensors

        def run(link: Link) -> None:
            with staged(tensor) as flat:
                link.exchange(receive=flat, source=src)

        return self._submit_message("recv", tensors, src, tag, run)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> FabricWork:
        raise ValueError("receiving from any source is not supported: name the source")

    def _submit_message(
        self, kind: str, tensors: list, peer: int, tag: int, run: Callable[[Link], None]
    ) -> FabricWork:
        """Messages from one rank to another keep their order, whatever their tags."""
        if peer == self._rank or not 0 <= peer < self._size:
            raise ValueError(f"{kind}: group rank {peer} is not another rank of group {self}")
        link = self._link(kind, f"message, tag {tag}, {described(tensors)}", POINT_TO_POINT)
        with self._mutex:
            return self._queue((kind, peer), link, tensors, run)

    # ---- the end

    def shutdown(self) -> None:
        """Finish what was submitted, then end the lanes and connections.

        It never hangs: if a lane is not done in time, its connections end first.
        """
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            if not lane.join(min(self._limit_s, _JOIN_S)):
                self._wire.close()
        self._wire.close()

    def abort(self) -> None:
        """End the connections at once: operations in flight fail."""
        self._fail(FabricError("the group was aborted"))
