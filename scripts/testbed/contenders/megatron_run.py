# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron's own pretrain() on one rank of an emulated cluster and measures its steps."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch

from scripts.testbed.contenders.layer_delay import layers_take
from scripts.testbed.contenders.step_meter import StepMeter
from scripts.testbed.contenders.workload import RankReport, Workload
from scripts.testbed.fabric import streams
from scripts.testbed.fabric.network import Network
from scripts.testbed.megatron_runs import close_communication, listening, patched, pretrain


def train_megatron(
    network: Network, workload: Workload, micro_batch: int, flags: Sequence[str]
) -> RankReport:
    """Run `pretrain()` with these flags, and return the measured steps."""
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    argv, captured = [*workload.argv(micro_batch), *flags], io.StringIO()
    # In the other schedules the main thread waits for the network itself, which the network counts.
    is_threaded = "--use-asynchzp" in flags and not {"main-thread", "inline"} & set(flags)
    meter = StepMeter(network, workload, *([_take_exposed_s] if is_threaded else []))
    _give_cuda_streams(meter)

    def end_step(logged: dict[str, Any]) -> None:
        loss = logged["loss_dict"].get("lm loss")
        meter.add_loss(None if loss is None else float(loss))

    try:
        with (
            contextlib.redirect_stdout(captured),
            layers_take(workload.layer_ms),
            patched(flags),
            listening(meter.begin_step, end_step),
        ):
            if "--use-megatron-fsdp" in flags:
                _gather_without_stream()
            pretrain(argv)
            close_communication()
    except BaseException as error:
        error.add_note(f"{' '.join(flags)}\n{captured.getvalue()[-1500:]}")
        raise
    return meter.report


def _take_exposed_s() -> float:
    from megatron_asynchzp.mcore.step.communication import Communication

    communication = Communication.current()
    return 0.0 if communication is None else communication.driver.timeline.pop_times().exposed_s


def _give_cuda_streams(meter: StepMeter) -> None:
    """Give Megatron streams that let work on a side stream go on, as a device would.

    The platform's are inert. They come with the first step: the model's builder reads results of a
    side stream on the host, which on a device would wait by itself.
    """
    for name in ("Stream", "Event", "current_stream", "synchronize"):
        setattr(torch.cuda, name, getattr(streams, name))

    def on_stream(stream: streams.Stream | None) -> streams.StreamContext:
        return streams.stream(stream if meter.num_steps else None)

    torch.cuda.stream = on_stream


def _gather_without_stream() -> None:
    """Let Megatron-FSDP gather on the default stream, by handles.

    It frees memory that its gathering stream still uses, which is right only if memory belongs to
    streams. The gathers overlap computation all the same, as nothing else is on that stream.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
        AllGatherPipeline,
    )

    begin = AllGatherPipeline.__init__

    def begin_without_stream(
        self: AllGatherPipeline, param_and_grad_buffer: Any, ag_stream: Any = None
    ) -> None:
        begin(self, param_and_grad_buffer)

    AllGatherPipeline.__init__ = begin_without_stream
