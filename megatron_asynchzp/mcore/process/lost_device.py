# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Detects an accelerator that torch does not see: it must not wait in gloo for NCCL ranks."""

import platform
from collections.abc import Mapping
from pathlib import Path

from megatron_asynchzp.errors import ConfigurationError

# The first two choose devices for the libraries, the others are Slurm's words for what a job got.
_CHOICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_ALLOTTED = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
_NONE_CHOSEN = ("", "-1")
_DEVICE_FILES = ("nvidia*", "davinci*")


def check_device_is_seen(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if torch sees no device where the machine or a flag says one is."""
    if (sign := sign_of_device(environ, Path("/dev"))) is not None:
        raise ConfigurationError(
            f"{platform.node()} has {sign}, but torch sees no device there ({_torchs_reason()}); "
            "mend the driver or install a torch for it, or train on the CPU with "
            "--asynchzp-device cpu"
        )


def sign_of_device(environ: Mapping[str, str], files: Path) -> str | None:
    """Return the sign that this process should have an accelerator, None if there is none."""
    chosen = {name: environ[name].strip() for name in _CHOICES if name in environ}
    if any(devices in _NONE_CHOSEN for devices in chosen.values()):
        return None
    named = chosen | {name: environ[name] for name in _ALLOTTED if environ.get(name)}
    paths = [str(path) for pattern in _DEVICE_FILES for path in sorted(files.glob(pattern))]
    return next(iter([*paths, *(f"{name}={value}" for name, value in named.items())]), None)


def _torchs_reason() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:
        first = " ".join(str(error).split()).partition(". ")[0]
        return f"torch {torch.__version__}: {first}"
    return f"torch {torch.__version__}"
