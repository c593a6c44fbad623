# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""legacy_pretrain.py with signals from within. $INTERRUPT is `SIGNAL RANK PLACE COUNT`, or the
name of a file of such lines, of which the restarts by torchrun take one each: which signal which
rank (or `all`) sends to itself, at which of the PLACES and when it has been there how often; for
the place `time`, how many milliseconds after training began. `forward+write 5+1` sends it at both.

What happens is noted in $JOURNAL/RESTART.RANK, a line each that is there even after SIGKILL:
`began ITERATION`, `step ITERATION LOSS` (all its bits), `saving FOLDER`, `saved FOLDER`,
`struck PLACE`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

PLACES = ("start", "load", "forward", "gather", "reduce", "preview", "write", "manifest", "tracker")
"""Before anything; before the states are filled in; before a module computes; with a collective
issued and not completed (parameters, gradients, parameters before their update); in a data file;
before the manifest; after it."""

_RANK, _RESTART = os.environ["RANK"], int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
_PID = os.getpid()


def note(*words: Any) -> None:
    if "JOURNAL" in os.environ:
        with open(Path(os.environ["JOURNAL"], f"{_RESTART}.{_RANK}"), "a") as journal:
            print(*words, file=journal)


class Plan:
    """What this rank is to do to itself."""

    def __init__(self):
        output = os.environ.get("INTERRUPT", "")
        if output and Path(output).is_file():
            lines = Path(output).read_text().splitlines()
            output = lines[_RESTART] if len(lines) > _RESTART else ""
        kind, rank, places, counts = output.split() if output else ("SIGTERM", "none", "", "0")
        self._signal = signal.Signals[kind]
        self.is_mine = rank in ("all", _RANK)
        # How often each place is visited until it is struck there.
        self._left = dict(zip(places.split("+"), map(int, counts.split("+")), strict=True))
        self._lock = threading.Lock()

    def visit(self, place: str) -> None:
        """The process is at `place`."""
        if not self.is_mine or place not in self._left or os.getpid() != _PID:
            return
        with self._lock:
            self._left[place] -= 1
            is_time = self._left[place] == 0
        if is_time:
            self._strike(place)

    def _strike(self, place: str) -> None:
        note("struck", place)
        os.kill(_PID, self._signal)

    def start_clock(self) -> None:
        if self.is_mine and "time" in self._left:
            threading.Thread(target=self._strike_later, daemon=True).start()

    def _strike_later(self) -> None:
        time.sleep(self._left["time"] / 1e3)
        self._strike("time")


PLAN = Plan()


def _before(owner: Any, name: str, place: str) -> None:
    """Visit `place` whenever owner.name is called."""
    original = getattr(owner, name)

    @wraps(original)
    def visiting(*args: Any, **kwargs: Any) -> Any:
        PLAN.visit(place)
        return original(*args, **kwargs)

    setattr(owner, name, visiting)


def _amid(owner: Any, name: str, place: str) -> None:
    """Visit `place` whenever the generator owner.name has issued a collective."""
    original = getattr(owner, name)

    @wraps(original)
    def visiting(*args: Any, **kwargs: Any) -> Generator:
        steps, sent = original(*args, **kwargs), None
        while True:
            try:
                work = steps.send(sent)
            except StopIteration as end:
                if end.value is not None and end.value.work is not None:
                    PLAN.visit(place)
                return end.value
            PLAN.visit(place)
            sent = yield work

    setattr(owner, name, visiting)


def _noting_saves(guard: Any) -> None:
    save, complete = guard.guard_save, guard.complete_directory

    def noted_save(call: Callable, args: Any, saves: Any, folder: Any, state: Any) -> Any:
        note("saving", Path(folder).name)
        return save(call, args, saves, folder, state)

    def noted_complete(folder: Any, *rest: Any) -> None:
        PLAN.visit("manifest")
        complete(folder, *rest)
        note("saved", Path(folder).name)
        PLAN.visit("tracker")

    guard.guard_save, guard.complete_directory = noted_save, noted_complete


def _noting_steps(training: Any) -> None:
    log, train = training.training_log, training.train
    words = signature(log)

    def noted_log(*args: Any, **kwargs: Any) -> Any:
        output = words.bind(*args, **kwargs).arguments
        if output["loss_dict"]:  # only the last stage of a pipeline has one
            note("step", output["iteration"], float(output["loss_dict"]["lm loss"]).hex())
        return log(*args, **kwargs)

    def noted_train(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        note("began", get_args().iteration)
        PLAN.start_clock()
        return train(*args, **kwargs)

    training.training_log, training.train = noted_log, noted_train


def prepare() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import training

    from megatron_asynchzp.mcore.checkpoint import save_guard
    from megatron_asynchzp.mcore.checkpoint.shards import ChunkCheckpoint
    from megatron_asynchzp.zero.unit import HZPUnit

    steps = {"gather": "gather_steps", "reduce": "reduce_steps", "preview": "preview_param_steps"}
    for place, name in steps.items():
        _amid(HZPUnit, name, place)
    _before(ChunkCheckpoint, "load_state_dict", "load")
    _before(filesystem_async, "_write_item", "write")
    _noting_saves(save_guard)
    _noting_steps(training)


if __name__ == "__main__":
    PLAN.visit("start")
    prepare()
    from tests.support import legacy_pretrain

    _before(legacy_pretrain, "forward_step", "forward")
    legacy_pretrain.train(legacy_pretrain.forward_step)
