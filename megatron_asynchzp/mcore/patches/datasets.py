# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where Megatron compiles the index builder of its datasets."""

from collections.abc import Callable

from megatron_asynchzp.mcore.patches.patch import replaces
from megatron_asynchzp.mcore.process.platform import are_dataset_helpers_ready


@replaces(
    "megatron.core.datasets.utils.compile_helpers",
    "",
    why="the wheel has the compiled index builder and no Makefile, without which Megatron ends",
    drop_when="Megatron's wheel has its Makefile, or it does not run `make` without one",
)
def compile_helpers(original: Callable) -> None:
    if not are_dataset_helpers_ready():
        original()
