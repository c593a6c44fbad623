# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where Megatron reads back the activations that it has offloaded."""

from collections.abc import Callable
from typing import Any

from megatron_asynchzp.mcore.patches.patch import replaces
from megatron_asynchzp.mcore.run.settings import run_args


@replaces(
    "megatron.core.pipeline_parallel.fine_grained_activation_offload.ChunkOffloadHandler",
    "min_offloaded_tensor_size cpu_tensor_pool max_inflight_offloads",
    why="what backward reads before Megatron has brought it back is copied from the host at once, "
    "maybe before the copy to the host has ended, for which Megatron does not wait",
    drop_when="tensor_pop waits for the event of the copy to the host",
)
def offload_chunk(original: Callable, *args: Any, **options: Any) -> Any:
    handler = original(*args, **options)
    if run_args() is not None:
        import torch

        pop = handler.tensor_pop

        def tensor_pop(tag: Any) -> Any:
            if isinstance(tag, tuple):
                group = handler.offload_groups[tag[0] - 1]
                if isinstance(group._tensors[tag], tuple):  # on the host
                    group.wait_offload_event(torch.cuda.current_stream())
            return pop(tag)

        handler.tensor_pop = tensor_pop
    return handler
