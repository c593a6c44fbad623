# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How a process ends after an error: in one line, below the traceback of a foreign error."""

import signal
import sys
from types import TracebackType

from megatron_asynchzp.checkpoint_files.errors import SaveError
from megatron_asynchzp.engine.comm.order_check import OrderMismatch
from megatron_asynchzp.engine.failure.last_line import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    CollectiveFailure,
    LastLine,
    end_process,
)
from megatron_asynchzp.engine.failure.other_collective import collective_of
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.process.refusal import report
from megatron_asynchzp.mcore.step.communication import Communication
from megatron_asynchzp.mcore.step.replicas import ReplicasDiffer

# Ends of training that need no traceback.
_LAST_WORDS = (CollectiveFailure, OrderMismatch, ReplicasDiffer, SaveError, KeyboardInterrupt)


def end_training(error: BaseException) -> None:
    """End this process with one line, for an uncaught error while ranks train.

    Every rank prints its line, because each sees another part of the failure. An error of Megatron
    or the script keeps its traceback above the line. Returns if nothing was being trained.
    """
    communication = Communication.current()
    if communication is None and not isinstance(error, _LAST_WORDS):
        return
    # Around an excepthook torch.distributed collects stderr, and this process will not come back.
    sys.stderr = sys.__stderr__ or sys.stderr
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends it again
        if communication is None:
            LastLine().print("interrupted")
            sys.exit(EXIT_INTERRUPTED)
        text, status = "interrupted", EXIT_INTERRUPTED
    elif isinstance(error, _LAST_WORDS):
        if communication is not None and isinstance(error, CollectiveFailure):
            error = _asked(error, communication)
        text, status = str(error), EXIT_FAILURE
    else:
        sys.__excepthook__(type(error), error, error.__traceback__)
        assert communication is not None  # all other errors returned above
        text, status = _describe_foreign(error, communication), EXIT_FAILURE
    last_line = communication.last_line if communication is not None else LastLine()
    last_line.print(text)
    if communication is not None and communication.driver.roll_call is not None:
        communication.driver.roll_call.await_readers()
    end_process(status)


def _asked(failure: CollectiveFailure, communication: Communication) -> BaseException:
    """Return the driver's first failure, or this one, after asking which ranks are missing."""
    communication.driver.fail(failure, ())
    try:
        communication.driver.raise_failure()
    except Exception as first:
        return first
    return failure


def _describe_foreign(error: BaseException, communication: Communication) -> str:
    try:
        communication.driver.raise_failure()
    except _LAST_WORDS as failure:
        return str(failure)  # a thread saw the cause of the main thread's error
    collective = collective_of(error)
    facts = [
        type(error).__name__,
        collective and f"in {collective}",
        communication.describe_position(),
    ]
    text = " ".join(filter(None, facts))
    roll_call = communication.driver.roll_call
    if roll_call is None or not isinstance(error, RuntimeError):  # as torch raises for a lost peer
        return text
    return f"{text}; {roll_call.find_missing()}"


def report_own_errors() -> None:
    """Print uncaught errors of ours as one line, in scripts that import the adaptor."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None):
        if isinstance(error, ConfigurationError):
            report(error)
        else:
            end_training(error)
            previous(kind, error, trace)

    sys.excepthook = excepthook
