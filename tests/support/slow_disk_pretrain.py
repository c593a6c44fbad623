# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""legacy_pretrain.py whose files take long to reach the disk: $SLOW is `RANK SECONDS FILE`, on
which rank the fsync takes how much longer, of each file whose path has FILE in it. $LIMIT_S is the
time limit of a collective from the first save on, which on the command line is in whole minutes.
"""

import os
import time
from datetime import timedelta
from functools import wraps
from typing import Any


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
_rank, _seconds, _file = os.environ["SLOW"].split()
if _rank == os.environ["RANK"]:
    slow_down(float(_seconds), _file)

if __name__ == "__main__":
    shorten_limit(float(os.environ["LIMIT_S"]))
    from tests.support import legacy_pretrain

    legacy_pretrain.train()
