# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs an unmodified Python script as one rank, its gloo groups on the modelled network.

python -m scripts.testbed.rank SCRIPT ...      or      ... -m MODULE ...
"""

import ctypes
import json
import os
import runpy
import signal
import sys
from functools import wraps
from pathlib import Path

COUNTS = "ASYNCHZP_TESTBED_COUNTS"
"""Variable: a folder, to which a rank writes what it has sent, as RANK.json."""
STREAMS = "ASYNCHZP_TESTBED_STREAMS"
"""Variable: whether torch.cpu gets streams, as an accelerator has them."""

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main() -> None:
    end_with_starter()
    import torch

    from scripts.testbed import fabric

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    network = fabric.register()
    _replace_gloo(fabric.BACKEND)
    if os.environ.get(STREAMS):
        from scripts.testbed.fabric.streams import install_streams

        install_streams()
    try:
        run_script(sys.argv[1:])
    finally:
        from scripts.testbed.counters import total

        sent = total(network.counters.snapshot().values())
        file = Path(os.environ[COUNTS], f"{os.environ['RANK']}.json")
        file.write_text(json.dumps([sent.operations, sent.wire_nbytes, sent.node_nbytes]))


def _replace_gloo(backend: str) -> None:
    """Every group that would be on gloo is on `backend`: torch makes all groups in one function."""
    from torch.distributed import distributed_c10d

    make = distributed_c10d._new_process_group_helper

    @wraps(make)
    def make_on_network(size, rank, ranks, asked, *args, **kwargs):
        on_cpu = "gloo" in str(asked) or str(asked) == "undefined"  # torch's own choice on CPUs
        chosen = distributed_c10d.Backend(backend) if on_cpu else asked
        return make(size, rank, ranks, chosen, *args, **kwargs)

    distributed_c10d._new_process_group_helper = make_on_network


def end_with_starter() -> None:
    """This process is killed when the one that started it ends."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def run_script(command: list[str]) -> None:
    """As Python would run it. command: SCRIPT ... or -m MODULE ..."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
