# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What happens in a process before Megatron runs in it."""

from megatron_asynchzp.mcore.patches.patch import apply_patches, check_version
from megatron_asynchzp.mcore.patches.table import PATCHES
from megatron_asynchzp.mcore.process.platform import choose_platform


def prepare_process(argv: list[str]) -> None:
    """Install the CPU platform where it is needed or asked for, and apply the patches.

    argv: the arguments of the training script; only --asynchzp-device is read. Idempotent.
    Raises IncompatibleMegatron, before anything is changed, for a Megatron we do not know.
    """
    check_version()
    choose_platform(argv)
    apply_patches(PATCHES)
