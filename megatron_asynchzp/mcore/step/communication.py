# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A rank's communication in the background, which ends before the process groups do."""

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.driver import CommReport, Driver
from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.comm.timeline import stop_trace
from megatron_asynchzp.engine.device import Device
from megatron_asynchzp.engine.failure.last_line import EXIT_FAILURE, LastLine, end_process
from megatron_asynchzp.engine.failure.roll_call import ANSWERS_WITHIN_S
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.captured_step import CapturedStep
from megatron_asynchzp.engine.zero.step import KeepBudgets
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.config import TraceRequest
from megatron_asynchzp.mcore.process.interrupts import watch_interrupts
from megatron_asynchzp.mcore.process.stop_signal import StopSignal


class Communication:
    """The driver that the runtimes of a rank share.

    Refuses a budget that is the device's free memory, on a device that does not know it.
    """

    _open: ClassVar[weakref.WeakSet["Communication"]] = weakref.WeakSet()

    def __init__(
        self,
        schedule: ScheduleConfig,
        device: Device,
        trace: TraceRequest | None = None,
        number_of_step: Callable[[], int | None] = lambda: None,
    ):
        if schedule.keeps_params_in_free_memory and device.left_nbytes() is None:
            raise ConfigurationError(
                "--asynchzp-keep-params-gb auto: a CPU cannot tell what a rank may still take; "
                "give GiB"
            )
        self.schedule = schedule
        self._trace, self.number_of_step = trace, number_of_step
        self._traced_step: int | None = None
        self.last_line = LastLine()
        self._stop_watching = watch_interrupts(
            self.last_line, partial(_why_terminated, weakref.ref(self))
        )
        self.driver = start_driver(schedule, device, self.last_line.watch_main)
        self.driver.call_roll()
        self.stop_signal = StopSignal(device, schedule.time_limit_s)
        self.runtimes: list[HZPRuntime] = []
        self.graphs: dict[str, CapturedStep] = {}  # of whole iterations, by Megatron's stage
        # Set by the optimizer, which is made after the runtimes.
        self.moments_of: Callable[[HZPUnit], Sequence[torch.Tensor]] = lambda unit: ()
        self.budgets = KeepBudgets()
        # When the model is collected, its threads end.
        self._end = weakref.finalize(self, _end_quietly, self.runtimes, self.driver)
        self._end.atexit = False
        # The last step's parameter shards are rebuilt in the background: peers wait for our part.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        Communication._open.add(self)

    @classmethod
    def open_runtimes(cls) -> "list[HZPRuntime]":
        return [runtime for communication in cls._open for runtime in communication.runtimes]

    def begin_step(self, step: int) -> None:
        """Start or end a trace before step number `step` writes its first gradient."""
        if self._trace is not None and self._traced_step is None:
            self._traced_step = self._trace.step_after(step)
        if step == self._traced_step:
            self.driver.timeline.start_capture()
        else:
            self._write_trace()

    def _write_trace(self) -> None:
        if self._trace is None or not self.driver.timeline.is_capturing:
            return
        try:
            stop_trace(self.driver.timeline, self._trace.path, dist.get_rank())
        except OSError as error:
            print(f"megatron_asynchzp: --asynchzp-trace: {error}", file=sys.stderr, flush=True)
        else:
            text = f"step {self._traced_step} is in {self._trace.path} (chrome://tracing, Perfetto)"
            print(f"megatron_asynchzp: {text}", flush=True)

    def take_report(self) -> CommReport:
        return self.driver.take_report()

    @property
    def units(self) -> list[HZPUnit]:
        return [unit for runtime in self.runtimes for unit in runtime.units]

    def nbytes_in_flight(self) -> int:
        return sum(sum(runtime.in_flight_nbytes().values()) for runtime in self.runtimes)

    def take_free_memory(self) -> None:
        """Let parameters fill the memory that is free after the first update (auto). Collective."""
        if self.budgets.params is not None and self.budgets.params.takes_free_memory:
            self.budgets.params.take_free_memory(self.driver.device.left_nbytes() or 0)

    def kept(self) -> dict[str, tuple[int, int]]:
        """Return how many gathers and reductions each budget saved last step, and its bytes."""
        params = None if self.budgets.params is None else self.budgets.params.residency
        return {
            kind: (residency.num_hits, residency.planned_nbytes)
            for kind, residency in (("gathers", params), ("reductions", self.budgets.grads))
            if residency is not None
        }

    def grad_records(self, pipeline: dist.ProcessGroup) -> list[list[str]]:
        """Gather the pipeline's KeepBudgets.grad_record, if it has a budget. Collective."""
        mine = self.budgets.grad_record()
        if self.budgets.grads is None:
            return []
        records: list[Any] = [mine] * pipeline.size()
        dist.all_gather_object(records, mine, group=pipeline)
        return records

    def expect_grads(self, records: Sequence[Sequence[str]], pipeline: dist.ProcessGroup) -> None:
        if len(records) == pipeline.size():
            self.budgets.expect_grads(records[pipeline.rank()], self.units)

    def describe_position(self) -> str:
        step = self.driver.step
        if step == 0:
            return "before the first step"
        if (task := self.driver.last_task) is None:
            return f"in step {step}"
        return f"in step {step}; the last collective submitted: {task.title}"

    def why_terminated(self) -> str:
        """Return the line for SIGTERM, which torchrun sends when another rank has failed."""
        # A rank that knows of that failure waits for it, because its own line says more.
        roll_call, deadline = self.driver.roll_call, time.monotonic() + _SAYS_MORE_S
        while roll_call is not None and roll_call.has_been_called and time.monotonic() < deadline:
            try:
                self.driver.raise_failure()
            except Exception as failure:
                return str(failure)
            time.sleep(0.05)
        return f"ended by SIGTERM {self.describe_position()}"

    def uses(self, group: dist.ProcessGroup) -> bool:
        return any(group in unit.groups.all_groups for unit in self.units)

    def close(self) -> None:
        """Finish all operations and end the threads, or raise at once what ended them."""
        Communication._open.discard(self)
        atexit.unregister(self._at_exit)
        if self._end.detach() is None:
            return
        if not self.driver.has_failed():
            self._write_trace()
        for graph in self.graphs.values():
            graph.release()  # a communicator ends only after the graphs that it is in
        try:
            _end(self.runtimes, self.driver)
        finally:
            self._stop_watching()

    @classmethod
    def current(cls) -> "Communication | None":
        return next(iter(cls._open), None)

    @classmethod
    def close_all(cls, group: dist.ProcessGroup | None = None) -> None:
        """Close those that use `group` (None: all) before it goes: no thread may outlive it."""
        for communication in list(cls._open):
            if group in (None, dist.group.WORLD) or communication.uses(group):
                communication.close()


# Time for a rank that knows of another's failure to meet and report its own.
_SAYS_MORE_S = ANSWERS_WITHIN_S + 3.0


def _why_terminated(reference: "weakref.ref[Communication]") -> str:
    communication = reference()
    return "ended by SIGTERM" if communication is None else communication.why_terminated()


def _end(runtimes: list[HZPRuntime], driver: Driver) -> None:
    try:
        for runtime in runtimes:
            runtime.close()
    finally:
        runtimes.clear()
        driver.close()


def _end_quietly(runtimes: list[HZPRuntime], driver: Driver) -> None:
    try:
        _end(runtimes, driver)
    except Exception:
        pass  # the caller is gone, and the step that failed has raised it already


def _close_at_exit(reference: "weakref.ref[Communication]") -> None:
    """Close when the script ends without destroying the process groups."""
    communication = reference()
    if communication is None or getattr(sys, "last_exc", None) is not None:
        return  # after an error there may be no peer left to finish anything with
    try:
        communication.close()
    except Exception as failure:
        communication.last_line.print(str(failure))
        end_process(EXIT_FAILURE)
