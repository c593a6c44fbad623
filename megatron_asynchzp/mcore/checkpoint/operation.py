# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which checkpoint operation of Megatron is in progress.

The guards begin an operation. Functions that Megatron calls meanwhile (state dicts, trackers,
readers) have no argument for it and ask here.
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from megatron_asynchzp.checkpoint_files.choice import Choice


@dataclass(frozen=True)
class Save:
    """Megatron saves a checkpoint."""

    args: Namespace  # the run's
    is_local: bool  # on the disks of the nodes; only a run of the same layout reads it


@dataclass(frozen=True)
class Load:
    """Megatron loads a checkpoint."""

    choice: Choice | None  # the checkpoint on shared storage; None if there is none
    # The local checkpoint that Megatron is told to load, -1 for none; None if Megatron loads
    # arguments alone and looks for local checkpoints itself.
    local_iteration: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether tensors come from shared storage: the first replica of a unit reads for all."""
        return self.local_iteration == -1


_CURRENT: ContextVar[Save | Load | None] = ContextVar("asynchzp_checkpoint", default=None)


@contextmanager
def in_progress(operation: Save | Load) -> Iterator[None]:
    token = _CURRENT.set(operation)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_save() -> Save | None:
    operation = _CURRENT.get()
    return operation if isinstance(operation, Save) else None


def current_load() -> Load | None:
    operation = _CURRENT.get()
    return operation if isinstance(operation, Load) else None


def is_shared_save() -> bool:
    save = current_save()
    return save is not None and not save.is_local


def is_shared_load() -> bool:
    load = current_load()
    return load is not None and load.is_shared
