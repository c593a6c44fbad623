# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One start of a long training: pretrain_gpt.py, whose steps are noted, and which a failure ends.

$LONG_TRAINING is a JSON object: `notes`, a file for a JSON line of each event; `start`, its number;
`fault`, `victims`, `step` and `ms`: what strikes which ranks so many milliseconds into which step.
"""

import contextlib
import json
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from scripts.testbed import megatron_runs
from scripts.testbed.ranks import end_with_parent

_ROOM_NBYTES = 100_000  # that a full disk still has: for this file of notes, not for a shard


class Notes:
    """What this rank notes, and the failure that waits for it."""

    def __init__(self, asked: dict[str, Any]):
        self._asked, self._file = asked, Path(asked["notes"])
        self._rank, self._pid = int(os.environ["RANK"]), os.getpid()
        self._step: int | None = None  # the last one that was completed

    def note(self, kind: str, **more: Any) -> None:
        line = {"kind": kind, "start": self._asked["start"], "at": time.time()} | more
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def note_once(self, kind: str, **more: Any) -> None:
        """By rank 0 alone."""
        if self._rank == 0:
            self.note(kind, **more)

    def begin_step(self) -> None:
        if self._step is None:
            from megatron.training import get_args

            args: Any = get_args()
            self._step = int(args.iteration)
            self.note_once("began", step=self._step)
        is_time = self._step + 1 == self._asked["step"]
        if is_time and self._rank in self._asked["victims"]:
            threading.Timer(self._asked["ms"] / 1e3, self._strike).start()

    def _strike(self) -> None:
        self.note("struck", fault=self._asked["fault"], rank=self._rank, step=self._step)
        if self._asked["fault"] == "full disk":
            limit = self._file.stat().st_size + _ROOM_NBYTES
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        else:
            is_asked = self._asked["fault"] == "signal"
            os.kill(self._pid, signal.SIGTERM if is_asked else signal.SIGKILL)

    def end_step(self, logged: dict[str, Any]) -> None:
        self._step = logged["iteration"]
        loss, norm = logged["loss_dict"].get("lm loss"), logged["grad_norm"]
        values = {"loss": None if loss is None else float(loss)}  # a skipped step has none
        values |= {"norm": None if norm is None else float(norm)}
        self.note_once("step", step=self._step, **values)

    def evaluated(self, result: tuple) -> None:
        if self._step is not None:  # a start that had no step left evaluates too
            self.note_once("validation", step=self._step, loss=float(result[0]["lm loss"]))

    def taken(self) -> contextlib.AbstractContextManager[None]:
        """Within it Megatron's training is noted."""
        return megatron_runs.listening(self.begin_step, self.end_step, evaluate=self.evaluated)


def train_on_device(argv: list[str], asked: dict[str, Any]) -> None:
    """On the emulated device, with layers of Transformer Engine over its stand-in."""
    from scripts.train.text_datasets import build_datasets

    with (
        megatron_runs.on_device(uses_te=True),
        mock.patch.dict(vars(megatron_runs), _datasets=build_datasets),
        Notes(asked).taken(),
        contextlib.suppress(SystemExit),  # how Megatron leaves at --exit-duration-in-mins
    ):
        megatron_runs.run_pretrain(argv, prepare=list)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    import pretrain_gpt  # pyright: ignore[reportMissingImports]

    with Notes(json.loads(os.environ["LONG_TRAINING"])).taken():
        pretrain_gpt.main()
