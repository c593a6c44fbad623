# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""legacy_pretrain.py whose steps take at least $STEP_S seconds, so that nodes can come and go.

Each process notes in a file of $JOURNAL, a line each that is there even after SIGKILL:
`began TIME ITERATION RANKS`, `step TIME ITERATION LOSS` (all its bits), `local TIME ITERATION` for
a local checkpoint that is complete. TIME: seconds since 1970.
"""

import os
import time
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

_STEP_S = float(os.environ.get("STEP_S", "0"))


def note(kind: str, *words: Any) -> None:
    path = Path(os.environ["JOURNAL"], str(os.getpid()))
    with path.open("a") as journal:
        print(kind, time.time(), *words, file=journal)


def prepare() -> None:
    from megatron.training import get_args, training

    log, train, save = training.training_log, training.train, training.save_checkpoint
    words = signature(log)

    @wraps(log)
    def noted_log(*args: Any, **kwargs: Any) -> Any:
        given = words.bind(*args, **kwargs).arguments
        if given["loss_dict"]:  # only the last stage of a pipeline has one
            note("step", given["iteration"], float(given["loss_dict"]["lm loss"]).hex())
        time.sleep(_STEP_S)
        return log(*args, **kwargs)

    @wraps(train)
    def noted_train(*args: Any, **kwargs: Any) -> Any:
        run = get_args()
        note("began", run.iteration, run.world_size)
        return train(*args, **kwargs)

    @wraps(save)
    def noted_save(iteration: int, *args: Any, **kwargs: Any) -> Any:
        save(iteration, *args, **kwargs)
        note("local" if kwargs.get("non_persistent_ckpt") else "saved", iteration)

    training.training_log, training.train = noted_log, noted_train
    training.save_checkpoint = noted_save


if __name__ == "__main__":
    prepare()
    from tests.support import legacy_pretrain

    legacy_pretrain.train(legacy_pretrain.forward_step)
