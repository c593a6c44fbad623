# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Connects Megatron's CUDA graph of a whole iteration (FullCudaGraphWrapper) with the engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_asynchzp.engine.zero.captured_step import CapturedStep
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.step.communication import Communication


def run_iteration(original: Callable[..., Any], wrapper: Any, options: dict[str, Any]) -> Any:
    """Run the micro-batches of a step or of an evaluation: eagerly, captured, or replayed.

    Args:
        original: FullCudaGraphWrapper.__call__.
        wrapper: Its object; Megatron makes one for each evaluation, and the class has the graphs.
        options: The arguments of forward_backward_func.
    """
    communication = Communication.current()
    is_training, number = not options["forward_only"], options["num_microbatches"]
    stage = "training" if is_training else "validation"
    if communication is None or wrapper.curr_iter(stage) < wrapper.cuda_graph_warmup_steps:
        return original(wrapper, **options)
    graph = communication.graphs.get(stage)
    if graph is None:
        release = partial(wrapper.reset_cuda_graph, stage)
        graph = CapturedStep(communication.runtimes, is_training, number, release)
        communication.graphs[stage] = graph
        graph.prepare()
        _capture(original, wrapper, graph, options)
    elif graph.num_micro_batches != number:
        raise ConfigurationError(
            f"--cuda-graph-impl full_iteration: {number} micro-batches of {stage}, but the graph "
            f"was captured with {graph.num_micro_batches}. Keep the batch size, or drop the flag."
        )
    else:
        graph.prepare()
        original(wrapper, **options)
    graph.note_replay()
    return wrapper.result[stage]


def _capture(
    original: Callable[..., Any], wrapper: Any, graph: CapturedStep, options: dict[str, Any]
) -> None:
    forward_backward = wrapper.forward_backward_func

    def captured(**given: Any) -> Any:
        with graph.capturing():
            return forward_backward(**given)

    wrapper.forward_backward_func = captured
    try:
        original(wrapper, **options)
    except RuntimeError as error:
        if graph.driver.has_failed():
            raise
        raise ConfigurationError(
            "--cuda-graph-impl full_iteration: the iteration cannot be captured "
            f"({str(error).partition(chr(10))[0]}). Use --cuda-graph-impl transformer_engine, or "
            "drop the flag."
        ) from error
    finally:
        wrapper.forward_backward_func = forward_backward
