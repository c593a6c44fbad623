# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where Megatron logs a step, and where torch destroys process groups."""

from collections.abc import Callable
from typing import Any

from megatron_asynchzp.mcore.patches.patch import replaces
from megatron_asynchzp.mcore.process.communication import Communication

# What Megatron's line about an iteration has, and nothing else it prints on the last rank.
_ITERATION_LINE = "elapsed time per iteration (ms):"


@replaces(
    "megatron.training.utils.print_rank_last",
    "message",
    why="the log line of an iteration gets the communication that computation waited for",
    drop_when="training_log takes further entries",
)
def print_rank_last(original: Callable, message: Any) -> None:
    if _ITERATION_LINE in str(message) and (communication := Communication.current()):
        message += communication.take_log_text()
    return original(message)


@replaces(
    "torch.distributed.distributed_c10d.destroy_process_group",
    "group",
    why="no collective of ours may be in flight, and no thread alive, when its group goes",
    drop_when="torch calls back before it destroys a process group",
)
def destroy_process_group(original: Callable, group: Any = None) -> None:
    Communication.close_all(group)
    return original(group)
