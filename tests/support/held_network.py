# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A network that notes every collective it is given and that a test can hold shut: the default
group of scripts/testbed/ranks.py, made anew. Knows nothing of who communicates.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from scripts.testbed.fabric import BACKEND, FabricGroup
from scripts.testbed.fabric.network import Network
from scripts.testbed.profile import NetworkProfile
from tests.support import fabric

_LONGEST_S = 15.0


class Submitted(NamedTuple):
    """A collective: over which group, of which kind, and what it carries, as in `SUM 64 x float32`
    (elements of the larger side and dtype)."""

    group: str
    kind: str
    carried: str


class HeldNetwork:
    """What this rank has submitted, and the gate that its operations pass when they run."""

    def __init__(self):
        self._changed = threading.Condition()
        self._journal: list[Submitted] = []
        self._waiting: list[Submitted] = []
        self._is_held: Callable[[Submitted], bool] = lambda operation: False

    def hold(self, is_held: Callable[[Submitted], bool]) -> None:
        """Let no operation begin for which `is_held` is true, until `open`."""
        with self._changed:
            self._is_held = is_held

    def open(self) -> None:
        with self._changed:
            self._is_held = lambda operation: False
            self._changed.notify_all()

    def await_held(self) -> Submitted:
        """The operation that stands at the gate. Raises TimeoutError where none comes."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, _LONGEST_S):
                raise TimeoutError("nothing that is held was submitted")
            return self._waiting[0]

    @property
    def num_held(self) -> int:
        with self._changed:
            return len(self._waiting)

    def take_journal(self) -> list[Submitted]:
        """What was submitted since the last call."""
        with self._changed:
            taken, self._journal = self._journal, []
            return taken

    def note(self, operation: Submitted) -> None:
        with self._changed:
            self._journal.append(operation)

    def pass_gate(self, operation: Submitted) -> None:
        """Hold the thread that runs `operation` for as long as the gate is shut for it."""
        deadline = time.monotonic() + _LONGEST_S
        with self._changed:
            if not self._is_held(operation):
                return
            self._waiting.append(operation)
            self._changed.notify_all()
            while self._is_held(operation) and time.monotonic() < deadline:
                self._changed.wait(0.1)
            self._waiting.remove(operation)


def replace_default_group() -> HeldNetwork:
    """Make groups created from now on, the default one included, belong to the network that is
    returned. Collective."""
    held = HeldNetwork()

    class HeldGroup(FabricGroup):
        def _submit(self, kind: str, detail: str, results: list, run: Callable) -> Any:
            operation = Submitted(str(self), kind, detail)
            held.note(operation)

            def run_when_open(link: Any) -> None:
                held.pass_gate(operation)
                run(link)

            return super()._submit(kind, detail, results, run_when_open)

    def register(profile: NetworkProfile) -> Network:
        network = Network(profile)
        dist.Backend.register_backend(
            BACKEND,
            lambda options, _=None: HeldGroup(options, network),
            extended_api=True,
            devices=["cpu"],
        )
        return network

    fabric.replace_default_group(register=register)
    return held
