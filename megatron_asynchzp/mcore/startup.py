# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what happens in a process before Megatron runs in it: the platform is chosen, the patches
are applied, and our own errors are reported in one line. Must not know which script follows.
"""

import importlib
import importlib.util
import os
import signal
import sys
import textwrap
import time
from argparse import ArgumentError, ArgumentParser
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import TracebackType

from megatron_asynchzp.comm.driver import CollectiveFailure
from megatron_asynchzp.comm.order_check import OrderMismatch
from megatron_asynchzp.mcore.arguments import add_device_argument
from megatron_asynchzp.mcore.checkpoint_files.errors import SaveError
from megatron_asynchzp.mcore.communication import Communication
from megatron_asynchzp.mcore.last_line import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    LastLine,
    leave,
    obey_sigterm,
)
from megatron_asynchzp.mcore.patches import PATCHES
from megatron_asynchzp.mcore.patching import IncompatibleMegatron, apply_patches, check_version
from megatron_asynchzp.mcore.unsupported import ConfigurationError
from megatron_asynchzp.sharding.topology import ShardSizeError

# Errors whose message is a line for the user; anything else keeps its traceback.
OWN_ERRORS = (ConfigurationError, IncompatibleMegatron, ShardSizeError)

# Ends of training that need no traceback.
_LAST_WORDS = (CollectiveFailure, OrderMismatch, SaveError, KeyboardInterrupt)

# How long the other ranks of a node leave the word to its first one. torchrun ends them as soon
# as that one has failed; a rank that fails alone speaks after this time.
_FIRST_RANK_SPEAKS_S = 15.0

# Accelerators that Megatron can drive. torch may know more (mps, xpu).
_ACCELERATORS = ("cuda", "npu")


def prepare_process(argv: list[str]) -> None:
    """Install the CPU platform where it is needed or asked for, and apply the patches.

    argv: the arguments of the training script; only --asynchzp-device is read. Idempotent.
    Raises IncompatibleMegatron, before anything is changed, for a Megatron we do not know.
    """
    check_version()
    reason = _reason_for_cpu(argv)
    if reason is not None:
        from megatron_asynchzp.mcore import cpu_platform

        _lend_dataset_helpers()
        _tell_platform(reason, cpu_platform.install())
    apply_patches(PATCHES)


def _lend_dataset_helpers() -> None:
    """Let a Megatron checkout use the compiled dataset helpers of an installed wheel.

    A fresh checkout has none, and the CPU platform does not run its Makefile (which needs a
    compiler, pybind11 and this Python's python3-config). Modules the checkout has stay its own.
    """
    datasets = importlib.import_module("megatron.core.datasets")
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return
    for entry in sys.path:
        folder = Path(entry, "megatron", "core", "datasets")
        if any((folder / f"helpers_cpp{ending}").is_file() for ending in EXTENSION_SUFFIXES):
            datasets.__path__.append(str(folder))
            return


def _reason_for_cpu(argv: list[str]) -> str | None:
    """Why this process runs on the CPU platform; None where an accelerator is used."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_device_argument(parser)
    try:
        chosen = parser.parse_known_args(argv)[0].asynchzp_device
    except ArgumentError:
        chosen = "auto"  # Megatron's parser, which knows all flags, tells of the wrong value
    if chosen == "cpu":
        return "--asynchzp-device cpu"
    return None if _has_accelerator() else "no accelerator found"


def _has_accelerator() -> bool:
    import torch

    if not torch.accelerator.is_available():
        return False
    return torch.accelerator.current_accelerator().type in _ACCELERATORS


def _tell_platform(reason: str, replaced: list[str]) -> None:
    if replaced and os.environ.get("RANK", "0") == "0":
        print(f"megatron_asynchzp: {reason}: CPU platform with gloo, replacing", flush=True)
        text = textwrap.fill(", ".join(replaced), 100, initial_indent="  ", subsequent_indent="  ")
        print(text, flush=True)


def report(error: BaseException) -> None:
    """Print one of OWN_ERRORS as one line on stderr, once per node."""
    obey_sigterm()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_RANK_SPEAKS_S)
    print(f"megatron_asynchzp: {error}", file=sys.stderr, flush=True)


def end_training(error: Exception | KeyboardInterrupt) -> None:
    """End this process, with one line, for an error that nobody caught while ranks train.

    Each rank speaks, for each sees another part of what happened. Errors that are none of ours
    keep their traceback, and the line comes after it. Returns where nothing was being trained,
    for Python to go on as usual.
    """
    communication = Communication.current()
    if communication is None and not isinstance(error, _LAST_WORDS):
        return
    obey_sigterm()
    # Around an excepthook torch.distributed collects stderr, and this process will not come back.
    sys.stderr = sys.__stderr__ or sys.stderr
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends it again
        if communication is None:
            LastLine().say("interrupted")
            sys.exit(EXIT_INTERRUPTED)
        text, status = "interrupted", EXIT_INTERRUPTED
    elif isinstance(error, _LAST_WORDS):
        text, status = str(error), EXIT_FAILURE
    else:
        sys.__excepthook__(type(error), error, error.__traceback__)
        text, status = _describe_foreign(error, communication), EXIT_FAILURE
    last_line = communication.last_line if communication is not None else LastLine()
    last_line.say(text)
    leave(status)


def _describe_foreign(error: Exception, communication: Communication) -> str:
    try:
        communication.driver.raise_failure()
    except _LAST_WORDS as failure:
        return str(failure)  # a thread saw it, and what the main thread met followed from it
    return f"{type(error).__name__} {communication.describe_position()}"


def report_own_errors() -> None:
    """Make uncaught errors of ours print one line in place of a traceback (exit status 1; 130 for
    an interrupt).

    For scripts that import the adaptor; the launcher catches these errors itself.
    """
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None):
        if isinstance(error, OWN_ERRORS):
            report(error)
        else:
            end_training(error)
            previous(kind, error, trace)

    sys.excepthook = excepthook
