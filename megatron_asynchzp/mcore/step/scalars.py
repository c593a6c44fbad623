# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Scalars for TensorBoard and Weights & Biases, written by Megatron's writers at each log line."""

from megatron_asynchzp.engine.comm.driver import CommReport
from megatron_asynchzp.mcore.run.settings import Run
from megatron_asynchzp.mcore.step.communication import Communication
from megatron_asynchzp.planner.memory import MomentBytes


def write_scalars(communication: Communication, report: CommReport) -> None:
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if not (tensorboard or wandb):
        return
    step, scalars = communication.driver.step, scalars_of(communication, report)
    if tensorboard:
        for tag, value in scalars.items():
            tensorboard.add_scalar(tag, value, step)
    if wandb:
        wandb.log(scalars, step)


def scalars_of(communication: Communication, report: CommReport) -> dict[str, float]:
    """Return a log line's tags and values, without untimed ones; bytes are of this rank."""
    timed = {
        "asynchzp/exposed-communication-ms": report.exposed_ms,
        "asynchzp/overlap-percent": report.overlap_percent,
    }
    scalars: dict[str, float] = {
        **{tag: value for tag, value in timed.items() if value is not None},
        "asynchzp/gathers-per-step": report.gathers_per_step,
        "asynchzp/reductions-per-step": report.reductions_per_step,
        "asynchzp/bytes-at-rest": nbytes_at_rest(communication),
        "asynchzp/bytes-in-flight": communication.nbytes_in_flight(),
    }
    for kind, (saved, nbytes) in communication.kept().items():
        scalars[f"asynchzp/{kind}-saved"] = saved
        scalars[f"asynchzp/bytes-kept-to-save-{kind}"] = nbytes
    return scalars


def nbytes_at_rest(communication: Communication) -> int:
    from megatron_asynchzp.mcore.start.state_bytes import state_nbytes_allocated

    settings = Run.current_settings()
    moments = MomentBytes() if settings is None else settings.moment_nbytes
    return sum(state_nbytes_allocated(communication.units, moments).values())
