# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Starts the driver of a schedule."""

from megatron_asynchzp.engine.comm.driver import Driver, OnFailure
from megatron_asynchzp.engine.comm.main_thread_driver import MainThreadDriver
from megatron_asynchzp.engine.comm.thread_driver import ThreadDriver
from megatron_asynchzp.engine.comm.timeline import Timeline
from megatron_asynchzp.engine.device import Device
from megatron_asynchzp.engine.schedule import AUTO, NOT_ON_STREAMS, ScheduleConfig
from megatron_asynchzp.errors import ConfigurationError


def start_driver(
    config: ScheduleConfig, device: Device, on_failure: OnFailure | None = None
) -> Driver:
    """Start the driver that `config` asks for on `device`.

    Raises:
        ConfigurationError: for threads on a device with streams.
    """
    kind = config.kind
    if kind == AUTO:
        kind = "main-thread" if device.runs_ahead else "threaded"
    if kind == "threaded" and device.runs_ahead:
        raise ConfigurationError(f"the schedule threaded {NOT_ON_STREAMS}")
    new_driver: type[Driver] = {
        "inline": Driver,
        "main-thread": MainThreadDriver,
        "threaded": ThreadDriver,
    }[kind]
    return new_driver(Timeline(device, config.timed_every), config.time_limit_s, on_failure)
