# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses an accelerator or the CPU platform, which this file alone connects with the adapter."""

import importlib
import importlib.util
import os
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from megatron_asynchzp.engine.schedule import NOT_ON_STREAMS
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.arguments import add_argument_of
from megatron_asynchzp.mcore.process.lost_device import check_device_is_seen

# Accelerators that Megatron can drive. torch may know more (mps, xpu).
_ACCELERATORS = ("cuda", "npu")


def choose_platform(argv: list[str]) -> None:
    """Install the CPU platform if --asynchzp-device in `argv`, or the machine, asks for it."""
    if (reason := reason_for_cpu(argv)) is None:
        return
    from megatron_asynchzp import cpu_platform

    lend_dataset_helpers()
    replaced = cpu_platform.install()
    if replaced and os.environ.get("RANK", "0") == "0":
        line = f"{reason}: CPU platform with gloo, {len(replaced)} names replaced"
        print(f"megatron_asynchzp: {line}", flush=True)


def apply_platform_defaults(args: Namespace) -> list[str]:
    """Give the arguments the values that an installed CPU platform needs; return lines to log."""
    from megatron_asynchzp import cpu_platform

    if not is_on_cpu():
        if getattr(args, "asynchzp_schedule", None) == "threaded":
            raise ConfigurationError(f"--asynchzp-schedule threaded {NOT_ON_STREAMS}")
        return []
    try:
        changed = cpu_platform.apply_cpu_defaults(args)
    except ValueError as error:
        raise ConfigurationError(" ".join(str(error).split())) from error
    return [f"CPU platform: {'; '.join(changed)}"] if changed else []


def is_on_cpu() -> bool:
    """Whether the CPU platform is installed. A dry run pretends either."""
    from megatron_asynchzp import cpu_platform

    return cpu_platform.is_installed()


def is_cpu_asked(argv: list[str]) -> bool:
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_argument_of(parser, "device")
    try:
        return parser.parse_known_args(argv)[0].asynchzp_device == "cpu"
    except ArgumentError:
        return False  # Megatron's parser, which knows all flags, reports the wrong value


def are_dataset_helpers_ready() -> bool:
    """Return whether the compiled dataset helpers work without Megatron's `make`.

    A wheel has them, and no Makefile. The CPU platform asks no Makefile either, because a checkout
    may have borrowed them. Raises ConfigurationError if they cannot be imported nor compiled.
    """
    (folder, *_) = importlib.import_module("megatron.core.datasets").__path__
    has_makefile = Path(folder, "Makefile").is_file()
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        if has_makefile:
            return False
        raise ConfigurationError(
            f"the dataset helpers of the Megatron in {folder} cannot be imported ({error}), and "
            "there is no Makefile to compile them; reinstall megatron-core for this Python"
        ) from error
    return is_on_cpu() or not has_makefile


def reason_for_cpu(argv: list[str]) -> str | None:
    """Return why these arguments run on the CPU, None on an accelerator; refuse an unseen one."""
    if is_cpu_asked(argv):
        return "--asynchzp-device cpu"
    if _has_accelerator():
        return None
    check_device_is_seen(os.environ)
    return "no accelerator found"


def _has_accelerator() -> bool:
    import torch

    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return accelerator is not None and accelerator.type in _ACCELERATORS


def lend_dataset_helpers() -> None:
    """Let a Megatron checkout use the compiled dataset helpers of an installed wheel."""
    # A fresh checkout has none, and its Makefile, which needs a compiler, pybind11 and
    # python3-config, is not run on the CPU. The checkout's own modules stay.
    datasets = importlib.import_module("megatron.core.datasets")
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return
    for entry in sys.path:
        folder = Path(entry, "megatron", "core", "datasets")
        if any((folder / f"helpers_cpp{ending}").is_file() for ending in EXTENSION_SUFFIXES):
            datasets.__path__.append(str(folder))
            return
