# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How Megatron's pretrain() starts: the weights it begins with, and the memory it takes until it
has a model and an optimizer. Weights are Megatron's own, drawn from the seed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from scripts.testbed import megatron_runs
from scripts.testbed.memory import MemoryCount
from tests.support.checkpoints import find_differences
from tests.support.engine import unshard


class StartMemory(NamedTuple):
    """Bytes of live tensors on this rank, beyond those before the model was built.

    built: at most while the modules were built; peak: until model and optimizer were complete;
    shards: of parameters, states: all at rest, in_flight: allocated for it, by the engine;
    largest_unit: its parameters, whole; model: all parameters, whole; drawing: what Megatron takes
    beside a weight to draw it on a CPU: in fp32 for all tensor-parallel ranks, cast, and cut.
    """

    built: int
    peak: int
    shards: int
    states: int
    in_flight: int
    largest_unit: int
    model: int
    drawing: int

    @property
    def built_limit(self) -> float:
        return 1.05 * (self.shards + self.largest_unit + self.drawing)

    @property
    def limit(self) -> float:
        return 1.05 * (self.states + self.in_flight + self.largest_unit)


class Start(NamedTuple):
    weights: dict[str, torch.Tensor]
    memory: StartMemory | None  # None: stock Megatron's
    log: str


@contextlib.contextmanager
def own_weights() -> Iterator[None]:
    """With the weights that Megatron draws, instead of the test-bed's, which set every matrix."""
    with mock.patch.object(megatron_runs, "seed_parameters", lambda chunks: chunks):
        yield


@contextlib.contextmanager
def whole_models() -> Iterator[None]:
    """As if no module were sharded before the model is complete."""
    from megatron_asynchzp.engine.zero.construction import Construction

    with mock.patch.object(Construction, "shard", lambda *_, **__: None):
        yield


def start(argv: list[str], count: MemoryCount | None = None) -> Start:
    """Run one step of pretrain() and return how it started. A collective call."""
    from megatron.training import training

    from megatron_asynchzp.mcore.step import data_parallel

    found: dict[str, Any] = {}
    set_up, shard = training.setup_model_and_optimizer, data_parallel.shard_chunks

    def peak() -> int:
        return count.peak_nbytes if count else 0

    def set_up_measured(*args: Any, **kwargs: Any) -> Any:
        before = count.live_nbytes if count else 0
        if count:
            count.reset_peak()
        model, *rest = set_up(*args, **kwargs)
        memory = _memory_of(model, found.get("built", 0) - before, peak() - before)
        found.update(weights=weights_of(model), memory=memory)
        return (model, *rest)

    def shard_measured(*args: Any, **kwargs: Any) -> None:
        found["built"] = peak()
        shard(*args, **kwargs)

    with (
        mock.patch.object(training, "setup_model_and_optimizer", set_up_measured),
        mock.patch.object(data_parallel, "shard_chunks", shard_measured),
    ):
        record = megatron_runs.run_pretrain([*argv, "--train-iters", "1"])
    return Start(found["weights"], found["memory"], record.log)


def weights_of(chunks: list) -> dict[str, torch.Tensor]:
    """A copy of every parameter of this rank's chunks, by its name. Collective."""
    units = [unit for chunk in chunks for unit in getattr(chunk, "units", [])]
    for unit in units:
        unshard(unit)
    weights = {
        f"{index} {name.removeprefix('module.').removeprefix('module.')}": param.detach().clone()
        for index, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }
    for unit in units:
        unit.reshard()
    return weights


def _memory_of(chunks: list, built: int, peak: int) -> StartMemory | None:
    units = [unit for chunk in chunks for unit in getattr(chunk, "units", [])]
    if not units:
        return None
    from megatron.training import get_args

    whole = [unit.layout.numel * unit.dtype.itemsize for unit in units]
    weight = max(piece.range.numel for unit in units for piece in unit.layout.slices)
    args: Any = get_args()
    itemsize = units[0].dtype.itemsize
    return StartMemory(
        built,
        peak,
        shards=sum(unit.model_param.nbytes for unit in units),
        states=sum(sum(chunk.runtime.state_nbytes().values()) for chunk in chunks),
        in_flight=sum(sum(chunk.runtime.in_flight_nbytes().values()) for chunk in chunks),
        largest_unit=max(whole),
        model=sum(whole),
        drawing=weight * ((4 + itemsize) * args.tensor_model_parallel_size + itemsize),
    )


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of parameters that one of the two lacks, or that differ in dtype or in a bit."""
    return sorted({*find_differences(one, other), *find_differences(other, one)})
