# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a training run reports when it ends: the bytes of state that every rank holds, as JSON."""

import functools
import json
import resource
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel


def add_report_arguments(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group(title="run report")
    group.add_argument(
        "--report-json",
        type=Path,
        metavar="FILE",
        help="at the end rank 0 writes what the run held",
    )
    return parser


def _storages_nbytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind `tensors` that are not in `seen` yet; adds them to `seen`."""
    nbytes = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            nbytes += storage.nbytes()
    return nbytes


def state_bytes(
    chunks: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, int]:
    """Return the bytes that this rank holds between steps, by state, counted from live tensors.

    "rings" is the memory that AsyncHZP keeps for parameters and gradients in flight. `chunks`: the
    wrapped model chunks (stock DDP or AsyncHZP); `optimizers`: the torch optimizers inside
    Megatron's. A storage counts once: views of one buffer are one buffer, its padding included, and
    in fp32 stock's main parameters are the model's own.
    """
    seen: set[int] = set()
    states = "model_param", "main_grad", "main_param", "optimizer_state", "rings"
    held: dict[str, int] = dict.fromkeys(states, 0)
    for chunk in chunks:
        if isinstance(chunk, AsyncHZPDataParallel):
            for state, nbytes in chunk.runtime.state_nbytes().items():
                held[state] += nbytes
            held["rings"] += sum(chunk.runtime.in_flight_nbytes().values())
            continue
        params = list(chunk.parameters())
        held["model_param"] += _storages_nbytes(params, seen)
        held["main_grad"] += _storages_nbytes((p.main_grad for p in params), seen)
    is_sharded = any(isinstance(chunk, AsyncHZPDataParallel) for chunk in chunks)
    for optimizer in optimizers:
        if not is_sharded:  # the wrapper has counted them: they are views of its buffer
            main = [p for group in optimizer.param_groups for p in group["params"]]
            held["main_param"] += _storages_nbytes(main, seen)
        values = [v for state in optimizer.state.values() for v in state.values()]
        held["optimizer_state"] += _storages_nbytes(filter(torch.is_tensor, values), seen)
    return held


class RunReport:
    """Remembers the model and the optimizers of one pretrain() call, which returns neither.

    The model comes from the calls of the forward step, the optimizers from torch's own hook after
    Optimizer.step. Both are held only as long as this object.
    """

    def __init__(self) -> None:
        self._chunks: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hook = register_optimizer_step_post_hook(self._remember_optimizer)

    def _remember_optimizer(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)

    def watch(self, forward_step: Callable) -> Callable:
        """The same forward step, which lets the report see the model it is called with."""

        @functools.wraps(forward_step)
        def watched(data_iterator: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if all(model is not known for known in self._chunks):
                self._chunks.append(model)
            return forward_step(data_iterator, model, *args, **kwargs)

        return watched

    def finish(self, args: Namespace) -> None:
        """Write --report-json, where asked for. Collective: every rank calls it after pretrain().

        args: Megatron's, with the flags of add_report_arguments.
        """
        self._hook.remove()
        if args.report_json is None:
            return
        own = state_bytes(self._chunks, self._optimizers)
        own["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        per_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(per_rank, own)
        report = {"world_size": dist.get_world_size(), "state_bytes_per_rank": per_rank}
        if dist.get_rank() == 0:
            args.report_json.parent.mkdir(parents=True, exist_ok=True)
            args.report_json.write_text(json.dumps(report, indent=1) + "\n")
