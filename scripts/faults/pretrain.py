# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The script of the cells with Megatron: its pretrain() on a tiny GPT, as pretrain_gpt.py calls it,
with a moment at which the fault strikes. Started by the launcher.

$FAULT_LIMIT_S: of a collective, which on the command line is in whole minutes. Notes as program.py.
"""

import os
import sys
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scripts.faults.moments import Moment

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import pretrain_gpt
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import training

from megatron_asynchzp.mcore.checkpoint import guard


def note(*words: Any) -> None:
    with Path(os.environ["FAULT_FOLDER"], "notes", os.environ["RANK"]).open("a") as out:
        print(*words, file=out)


def shorten_limit() -> None:
    """As if --distributed-timeout-minutes took fractions."""
    parse = pretrain_gpt.parse_and_validate_args

    def shortened(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        parsed.distributed_timeout_minutes = float(os.environ["FAULT_LIMIT_S"]) / 60
        return parsed

    pretrain_gpt.parse_and_validate_args = shortened


def prepare(moment: Moment) -> None:
    moment.amid_collectives()
    moment.before(filesystem_async, "_write_item", "save")
    moment.before(filesystem.FileSystemReader, "read_data", "load")
    register_optimizer_step_pre_hook(lambda *_: moment.visit("optimizer"))
    moment.is_armed = "iter_" in "".join(os.listdir(os.environ["FAULT_CHECKPOINTS"]))
    complete = guard.complete_directory

    def completed(*args: Any) -> None:
        complete(*args)
        moment.is_armed = True

    guard.complete_directory = completed


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

        note("began", get_args().iteration)
        return train(*args, **kwargs)

    training.training_log, training.train = noted_log, noted_train


if __name__ == "__main__":
    shorten_limit()
    prepare(Moment())
    note_steps()
    pretrain_gpt.main()
    note("done")
