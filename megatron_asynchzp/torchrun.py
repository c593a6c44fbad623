# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_asynchzp.torchrun ...` is torchrun, but for the status after a SIGTERM:
torchrun ends with 1 and a traceback whatever its ranks did, so that a scheduler takes a run that
saved well for a failure."""

import signal
import sys
from subprocess import Popen
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler


def watch_ranks() -> dict[int, Popen]:
    """The processes that torchrun starts from now on, by their place on this node; of a place the
    one that was started last."""
    started: dict[int, Popen] = {}
    kind: Any = subprocess_handler.SubprocessHandler
    original = kind.__init__

    def noting(handler: Any, *args: Any, **kwargs: Any) -> None:
        original(handler, *args, **kwargs)
        started[handler.local_rank_id] = handler.proc

    kind.__init__ = noting
    return started


def main(argv: list[str]) -> int:
    """0 also where SIGTERM came and every rank of this node ended with 0 then."""
    ranks = watch_ranks()
    try:
        run.main(argv)
    except SignalException as ended:
        is_asked = ended.sigval == signal.SIGTERM
        if not is_asked or not ranks or any(rank.poll() != 0 for rank in ranks.values()):
            raise
        print("megatron_asynchzp: SIGTERM: every rank of this node ended well", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
