# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Prepares a process before Megatron runs in it."""

import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Sequence

import torch

from megatron_asynchzp import mcore
from megatron_asynchzp.errors import ConfigurationError, MissingPackage
from megatron_asynchzp.mcore.patches.patch import Patch, apply_patches, found_version, mismatch
from megatron_asynchzp.mcore.patches.table import PATCHES
from megatron_asynchzp.mcore.process.platform import choose_platform
from megatron_asynchzp.versions import TORCH, Version, untested

_ACT_ON_IMPORT = ("adaptor", "door.plugin")


def prepare_process(argv: list[str]) -> None:
    """Install the CPU platform if it is needed or asked for, and apply the patches.

    Idempotent. argv are the training script's arguments; only --asynchzp-device is read. Rank 0
    announces slow steps. Raises ConfigurationError, before any change, for an unknown Megatron.
    """
    if "megatron.training" in sys.modules:  # a script that imports the adaptor was launched
        choose_platform(argv)
        patch_megatron()
        return
    start_s = time.monotonic()
    _announce("importing Megatron, which can take half a minute")
    found_version()  # refuses a Megatron that is missing or too old, before it is imported
    choose_platform(argv)
    patch_megatron()
    _announce(f"Megatron is ready after {time.monotonic() - start_s:.0f} s; the script starts")


def patch_megatron(patches: Sequence[Patch] = PATCHES) -> None:
    """Apply the patches if Megatron has all that our modules import, or name what it lacks."""
    if Version.of(torch.__version__) < Version.of(TORCH[0]):
        raise ConfigurationError(
            f"torch {torch.__version__} was found at {torch.__file__}, and this version of "
            f"megatron_asynchzp needs {TORCH[0]} or later; install one"
        )
    for line in untested({"torch": torch.__version__, "megatron-core": found_version()}):
        _announce(line)
    for module in pkgutil.walk_packages(mcore.__path__, f"{mcore.__name__}."):
        if module.name.removeprefix(f"{mcore.__name__}.") not in _ACT_ON_IMPORT:
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                if missing := MissingPackage.of(error, "a Megatron script"):
                    raise missing from error
                if not (error.name or "").startswith("megatron."):
                    raise
                symbol = ".".join(filter(None, (error.name, error.name_from)))
                raise mismatch(symbol, "does not exist") from error
    apply_patches(patches)


def _announce(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron_asynchzp: {text}", flush=True)
