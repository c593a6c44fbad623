# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the queue on which Megatron's checkpoint writer returns its results."""

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async


def return_results_in_process() -> None:
    """Let the writer of synchronous saves return its results on a queue within the process.

    Megatron makes a manager's queue: another Python process per rank, with torch imported, for a
    writer in threads. It takes seconds and half a gigabyte, and outlives a killed rank. Does
    nothing if a queue exists. Saves during training need Megatron's.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
