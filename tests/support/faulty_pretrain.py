# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""legacy_pretrain.py with a fault: $FAULT is `KIND RANK CALL`, what happens on which rank in which
forward, counted from 1. $FAULT_LIMIT_S, if set, is the time limit of a collective, which on the
command line is in whole minutes.
"""

import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron_asynchzp.mcore.communication import Communication
from megatron_asynchzp.mcore.settings import Settings
from tests.support import legacy_pretrain


class OddError(Exception):
    """Something that neither Megatron nor the plugin knows."""


def shorten_limit(limit_s: float) -> None:
    """As if --distributed-timeout-minutes took fractions, for the engine and its groups."""
    resolve = Settings.of

    def shortened(args, group_size: int) -> Settings:
        found = resolve(args, group_size)
        schedule = replace(found.schedule, time_limit_s=limit_s)
        return replace(found, schedule=schedule, timeout=timedelta(seconds=limit_s))

    Settings.of = shortened


def act(kind: str, model) -> None:
    if kind in ("SIGKILL", "SIGSTOP", "SIGINT"):
        os.kill(os.getpid(), signal.Signals[kind])
    elif kind == "raise":
        raise OddError("not ours")
    elif kind == "flip":  # a bit of what the optimizer owns
        communication = Communication.current()
        assert communication is not None
        communication.runtimes[0].units[0].main_param.storage.view(torch.int32)[0] ^= 1
    elif kind == "skip":  # the first layer is not called any more
        decoder = get_attr_wrapped_model(model, "decoder")
        decoder.layers = decoder.layers[1:]
    else:
        raise ValueError(kind)


_calls: list[int] = []


def forward_step(data_iterator, model) -> tuple:
    kind, rank, call = os.environ.get("FAULT", "none 0 0").split()
    _calls.append(1)
    if len(_calls) == int(call) and rank in ("all", os.environ["RANK"]):
        act(kind, model)
    return legacy_pretrain.forward_step(data_iterator, model)


if __name__ == "__main__":
    if "FAULT_LIMIT_S" in os.environ:
        shorten_limit(float(os.environ["FAULT_LIMIT_S"]))
    legacy_pretrain.train(forward_step)
    kind, rank, _ = os.environ.get("FAULT", "none 0 0").split()
    if kind == "late":
        if rank == os.environ["RANK"]:
            time.sleep(2)
        dist.destroy_process_group()
        print("threads:", [t.name for t in threading.enumerate() if "asynchzp" in t.name])
