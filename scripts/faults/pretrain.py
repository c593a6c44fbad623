# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron's pretrain() on a tiny GPT, with a moment at which the fault strikes.

$FAULT_LIMIT_S: of a collective, which on the command line is in whole minutes; $FAULT_CHECKPOINTS:
the folder of --save and --load. Notes as program.py.
"""

import os
import sys
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import arguments, training
from torch.distributed.checkpoint import filesystem
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scripts.faults.moments import Moment
from scripts.testbed import megatron_runs


def note(*words: Any) -> None:
    with Path(os.environ["FAULT_FOLDER"], "notes", os.environ["RANK"]).open("a") as out:
        print(*words, file=out)


def shorten_limit() -> None:
    """As if --distributed-timeout-minutes took fractions: validation then resolves the run."""
    parse = arguments.parse_args

    @wraps(parse)
    def shortened(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        parsed.distributed_timeout_minutes = float(os.environ["FAULT_LIMIT_S"]) / 60
        return parsed

    arguments.parse_args = shortened


def prepare(moment: Moment) -> None:
    moment.amid_collectives()
    moment.before(filesystem_async, "_write_item", "save")
    moment.before(filesystem.FileSystemReader, "read_data", "load")
    register_optimizer_step_pre_hook(lambda *_: moment.visit("optimizer"))
    moment.is_armed = any(Path(os.environ["FAULT_CHECKPOINTS"]).glob("iter_*"))
    save = training.save_checkpoint

    @wraps(save)
    def saved(*args: Any, **kwargs: Any) -> Any:
        result = save(*args, **kwargs)
        moment.is_armed = True
        return result

    training.save_checkpoint = saved


def note_steps() -> None:
    log, train = training.training_log, training.train
    words = signature(log)

    @wraps(log)
    def noted_log(*args: Any, **kwargs: Any) -> Any:
        about = words.bind(*args, **kwargs).arguments
        note("step", about["iteration"], float(about["loss_dict"]["lm loss"]).hex())
        return log(*args, **kwargs)

    @wraps(train)
    def noted_train(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        args_of_run: Any = get_args()
        note("began", args_of_run.iteration)
        return train(*args, **kwargs)

    training.training_log, training.train = noted_log, noted_train


if __name__ == "__main__":
    shorten_limit()
    prepare(Moment())
    note_steps()
    megatron_runs.pretrain(sys.argv[1:])
    note("done")
