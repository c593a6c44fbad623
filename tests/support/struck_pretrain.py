# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""legacy_pretrain.py that is struck from within, and notes what happens.

$INTERRUPT is `WHAT RANK PLACE COUNT`, or the name of a file of such lines, of which the restarts by
torchrun take one each: which signal which rank (or `all`) sends to itself, or `raise` for an error,
at which of the PLACES and when it has been there how often; for the place `time`, how many
milliseconds after training began. `forward+write 5+1` strikes at both.
$STEP_S: a step takes at least so many seconds. $SLOW is `RANK SECONDS FILE`: on which rank the
fsync takes how much longer, of each file whose path has FILE in it. $LATE: all ranks destroy their
groups at the end, and this rank does so two seconds late. $LIMIT_S: the time limit of a collective
from the first save on, which on the command line is in whole minutes.

What happens is noted in $JOURNAL/RESTART.RANK.PROCESS, a line each that is there even after
SIGKILL: `began TIME ITERATION RANKS`, `step TIME ITERATION LOSS` (all its bits), `saving TIME
FOLDER`, `saved TIME FOLDER`, `struck TIME PLACE`. TIME: seconds since 1970.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Any

from scripts.faults.moments import visit_amid, visit_before

PLACES = ("start", "load", "forward", "gather", "reduce", "preview", "write", "manifest", "tracker")
"""Before anything; before the states are filled in; before a module computes; with a collective
issued and not completed (parameters, gradients, parameters before their update); in a data file;
before the manifest; after it."""

_RANK, _RESTART = os.environ["RANK"], int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
_PID = os.getpid()


def note(kind: str, *words: Any) -> None:
    if "JOURNAL" in os.environ:
        with open(Path(os.environ["JOURNAL"], f"{_RESTART}.{_RANK}.{_PID}"), "a") as journal:
            print(kind, time.time(), *words, file=journal)


class OddError(Exception):
    """Something that neither Megatron nor the plugin knows."""


class Plan:
    """What this rank is to do to itself."""

    def __init__(self):
        output = os.environ.get("INTERRUPT", "")
        if output and Path(output).is_file():
            lines = Path(output).read_text().splitlines()
            output = lines[_RESTART] if len(lines) > _RESTART else ""
        kind, rank, places, counts = output.split() if output else ("SIGTERM", "none", "", "0")
        self._kind = kind
        self.is_mine = rank in ("all", _RANK)
        # How often each place is visited until it is struck there.
        self._left = dict(zip(places.split("+"), map(int, counts.split("+")), strict=True))
        self._lock = threading.Lock()

    def awaits(self, place: str) -> bool:
        return self.is_mine and place in self._left

    def visit(self, place: str) -> None:
        """The process is at `place`."""
        if not self.awaits(place) or os.getpid() != _PID:
            return
        with self._lock:
            self._left[place] -= 1
            is_time = self._left[place] == 0
        if is_time:
            self._strike(place)

    def _strike(self, place: str) -> None:
        note("struck", place)
        if self._kind == "raise":
            raise OddError("not ours")
        os.kill(_PID, signal.Signals[self._kind])

    def start_clock(self) -> None:
        if self.awaits("time"):
            threading.Thread(target=self._strike_later, daemon=True).start()

    def _strike_later(self) -> None:
        time.sleep(self._left["time"] / 1e3)
        self._strike("time")


PLAN = Plan()


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
        time.sleep(float(os.environ.get("STEP_S", "0")))
        return log(*args, **kwargs)

    def noted_train(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        note("began", get_args().iteration, get_args().world_size)
        PLAN.start_clock()
        return train(*args, **kwargs)

    training.training_log, training.train = noted_log, noted_train


def prepare() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import training

    from megatron_asynchzp.engine.zero.unit import HZPUnit
    from megatron_asynchzp.mcore.checkpoint import save_guard
    from megatron_asynchzp.mcore.checkpoint.shards import ChunkCheckpoint

    steps = {"gather": "unshard_steps", "reduce": "reduce_steps", "preview": "preview_param_steps"}
    for place in filter(PLAN.awaits, steps):
        visit_amid(HZPUnit, steps[place], partial(PLAN.visit, place))
    visit_before(ChunkCheckpoint, "load_state_dict", partial(PLAN.visit, "load"))
    visit_before(filesystem_async, "_write_item", partial(PLAN.visit, "write"))
    _noting_saves(save_guard)
    _noting_steps(training)


def slow_down(seconds: float, file: str) -> None:
    fsync = os.fsync

    @wraps(fsync)
    def slow(opened: Any) -> None:
        number = opened if isinstance(opened, int) else opened.fileno()
        if file in os.readlink(f"/proc/self/fd/{number}"):
            time.sleep(seconds)
        fsync(opened)

    os.fsync = slow


def shorten_limit(limit_s: float) -> None:
    """Not before the first save: the ranks start seconds apart on a busy machine."""
    from megatron.training import training
    from torch.distributed import distributed_c10d

    save = training.save_checkpoint

    @wraps(save)
    def limited(*args: Any, **kwargs: Any) -> Any:
        distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s))
        return save(*args, **kwargs)

    training.save_checkpoint = limited


# Also in a process that Megatron starts to write beside training, which imports this file.
_slow_rank, *_slow = os.environ.get("SLOW", "none").split()
if _slow_rank == _RANK:
    slow_down(float(_slow[0]), _slow[1])

if __name__ == "__main__":
    PLAN.visit("start")
    prepare()
    if "LIMIT_S" in os.environ:
        shorten_limit(float(os.environ["LIMIT_S"]))
    import torch.distributed as dist

    from tests.support import legacy_pretrain

    visit_before(legacy_pretrain, "forward_step", partial(PLAN.visit, "forward"))
    legacy_pretrain.train(legacy_pretrain.forward_step)
    if late := os.environ.get("LATE"):
        time.sleep(2.0 if late == _RANK else 0.0)
        dist.destroy_process_group()
        print("threads:", [t.name for t in threading.enumerate() if "asynchzp" in t.name])
