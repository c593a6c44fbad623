# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a rank stops at a chosen moment of its training until the fault has struck.

$FAULT_FOLDER is the folder of the cell, $FAULT_MOMENT `RANK MOMENT VISIT`. The rank makes `reached`
there, and goes on once there is `struck`.
"""

import os
import threading
import time
from collections.abc import Callable, Generator
from functools import partial, wraps
from pathlib import Path
from typing import Any

REACHED, STRUCK = "reached", "struck"
_STEPS = {
    "gather": "unshard_steps",
    "reduce": "reduce_steps",
    "grad-sync": "sync_grad_steps",
    "param-sync": "sync_param_steps",
}


class Moment:
    """What this rank waits for. Nothing without the variables."""

    def __init__(self):
        self._folder = Path(os.environ.get("FAULT_FOLDER", ""))
        rank, self._name, visit = os.environ.get("FAULT_MOMENT", "-1 none 0").split()
        self._left = int(visit) if rank == os.environ.get("RANK") else 0
        self._pid, self._lock = os.getpid(), threading.Lock()
        self.is_armed = False

    def visit(self, name: str) -> None:
        """This rank is at the moment `name`."""
        if name != self._name or not self.is_armed or os.getpid() != self._pid:
            return
        with self._lock:
            self._left -= 1
            is_time = self._left == 0
        if is_time:
            (self._folder / REACHED).touch()
            while not (self._folder / STRUCK).exists():
                time.sleep(0.002)

    def before(self, owner: Any, method: str, name: str) -> None:
        """Visit `name` whenever owner.method is called."""
        visit_before(owner, method, partial(self.visit, name))

    def amid_collectives(self) -> None:
        """Visit a lane's name whenever a unit has issued a collective of it."""
        from megatron_asynchzp.engine.zero.unit import HZPUnit

        for name, method in _STEPS.items():
            visit_amid(HZPUnit, method, partial(self.visit, name))


def visit_before(owner: Any, method: str, visit: Callable[[], None]) -> None:
    """Call `visit` whenever owner.method is called."""
    original = getattr(owner, method)

    @wraps(original)
    def visiting(*args: Any, **kwargs: Any) -> Any:
        visit()
        return original(*args, **kwargs)

    setattr(owner, method, visiting)


def visit_amid(owner: Any, method: str, visit: Callable[[], None]) -> None:
    """Call `visit` whenever the generator owner.method has issued a collective."""
    original = getattr(owner, method)

    @wraps(original)
    def visiting(*args: Any, **kwargs: Any) -> Generator:
        steps, sent = original(*args, **kwargs), None
        while True:
            try:
                work = steps.send(sent)
            except StopIteration as end:
                if end.value is not None and end.value.work is not None:
                    visit()
                return end.value
            visit()
            sent = yield work

    setattr(owner, method, visiting)
