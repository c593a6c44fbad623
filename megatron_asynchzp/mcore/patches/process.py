# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces the start of groups, logging, the look for a signal, and the destruction of groups."""

from collections.abc import Callable
from typing import Any

from megatron_asynchzp.mcore.patches.patch import replaces
from megatron_asynchzp.mcore.run.agreement import refuse_other_flags
from megatron_asynchzp.mcore.run.settings import run_args
from megatron_asynchzp.mcore.step.communication import Communication
from megatron_asynchzp.mcore.step.scalars import write_scalars

# What Megatron's line about an iteration has, and nothing else it prints on the last rank.
_ITERATION_LINE = "elapsed time per iteration (ms):"


@replaces(
    "megatron.core.parallel_state.initialize_model_parallel",
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "pipeline_model_parallel_comm_backend use_sharp context_parallel_size "
    "hierarchical_context_parallel_sizes hybrid_context_parallel expert_model_parallel_size "
    "gtp_remat_size[0.19] expert_gtp_remat_size[0.19] num_distributed_optimizer_instances "
    "expert_tensor_parallel_size nccl_communicator_config_path distributed_timeout_minutes order "
    "get_embedding_ranks get_position_embedding_ranks create_gloo_process_groups "
    "high_priority_stream_groups sharp_enabled_group rank_offset local_world_size",
    why="ranks with other flags are refused before they make groups, for which they would wait",
    drop_when="Megatron compares the flags of its ranks",
)
def initialize_model_parallel(original: Callable, *args: Any, **options: Any) -> None:
    if (run := run_args()) is not None:
        refuse_other_flags(run)
    return original(*args, **options)


@replaces(
    "megatron.training.utils.print_rank_last",
    "message",
    why="the log line of an iteration gets the communication that computation waited for",
    drop_when="training_log takes further entries",
)
def print_rank_last(original: Callable, message: Any) -> None:
    if _ITERATION_LINE in str(message) and (communication := Communication.current()):
        report = communication.take_report()
        if report.exposed_ms is not None:
            message += f" exposed comm (ms): {report.exposed_ms:.1f} |"
        if report.overlap_percent is not None:
            message += f" overlap (%): {report.overlap_percent:.1f} |"
        for kind, (saved, nbytes) in communication.kept().items():
            message += f" {kind} saved: {saved} ({nbytes / 2**20:.1f} MiB kept) |"
        write_scalars(communication, report)
    return original(message)


@replaces(
    "megatron.training.training.report_theoretical_memory",
    "args num_microbatches verbose",
    why="Megatron's formula for weights and optimizer does not know the shard sizes",
    drop_when="the formula asks the wrapper",
)
def report_theoretical_memory(original: Callable, *args: Any, **options: Any) -> Any:
    # The start table has printed the states, by formula and as allocated.
    return original(*args, **options) if run_args() is None else None


@replaces(
    "megatron.training.training.get_signal_handler",
    "",
    why="whether SIGTERM came to any rank is known from one small all-reduce in the optimizer's "
    "step, where Megatron gathers it from the world and waits for each rank's answer",
    drop_when="Megatron reduces it",
)
def get_signal_handler(original: Callable) -> Any:
    communication = Communication.current()
    return original() if communication is None else communication.stop_signal


@replaces(
    "torch.distributed.distributed_c10d.destroy_process_group",
    "group",
    why="no collective of ours may be in flight, and no thread alive, when its group goes",
    drop_when="torch calls back before it destroys a process group",
)
def destroy_process_group(original: Callable, group: Any = None) -> None:
    Communication.close_all(group)
    return original(group)
