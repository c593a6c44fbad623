# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a step: units, visits, phases and actions, and the order of phases."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_asynchzp.engine.sharding.early_units import OuterTraffic
from megatron_asynchzp.engine.sharding.in_flight import UnitInFlight


@dataclass(frozen=True)
class OrderUnit:
    """The properties of a unit on which the order depends."""

    size: object  # equal for units of the same size
    memory: UnitInFlight  # in flight
    is_gathered: bool = True  # its parameter shard is a part
    is_reduced: bool = True  # its gradient shard is a part
    is_trained: bool = True
    # only the end of backward completes its gradient (units of several modules or around others)
    reduces_at_end: bool = False
    sum_nbytes: int = 0  # of its whole gradient in fp32
    traffic: OuterTraffic = OuterTraffic(0.0, 0.0)  # that it sends outside its parameter shard
    may_be_early: bool = True  # nothing changes its gradient between its reduction and the clipping


@dataclass(frozen=True)
class Visit:
    """A call of the module that holds the unit `unit`, with the calls inside it, in order."""

    unit: int
    inner: tuple["Visit", ...] = ()


class Phase(NamedTuple):
    """Forward or backward of a micro-batch through a model chunk."""

    is_forward: bool
    chunk: int
    micro_batch: int
    is_last: bool = False  # the micro-batch after which all ranks reduce the chunk's gradients


COMPUTE, GATHER, REDUCE, GRAD_SYNC, PARAM_SYNC = range(5)
"""Kinds of actions; the last four are lanes of their own."""


class Action(NamedTuple):
    """A computation of the main thread with a unit, or an operation that it submits."""

    kind: int
    unit: int
    # earlier actions, by index, that must have ended: results that it reads, and the last uses of
    # the memory that it writes
    after: tuple[int, ...]
    phase: int  # index of the phase


def in_use_order(visits: Sequence[Visit], is_forward: bool) -> Iterator[int]:
    for visit in visits if is_forward else reversed(visits):
        yield visit.unit
        yield from in_use_order(visit.inner, is_forward)


def in_completion_order(visits: Sequence[Visit]) -> Iterator[int]:
    for visit in reversed(visits):
        yield from in_completion_order(visit.inner)
        yield visit.unit


# ---- phases of a pipeline: Megatron's 1F1B, plain and interleaved


def stage_phases(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Phase]:
    """Return the phases of a step; several chunks want a multiple of `stages` micro-batches."""
    if chunks > 1 and micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches are not a multiple of {stages} stages")
    # A group of micro-batches, one for each stage, goes through chunk 0, then through chunk 1, ...
    group = stages if chunks > 1 else 1
    table = [
        (chunk, micro_batch)
        for start in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(start, start + group)
    ]
    forward = [Phase(True, chunk, index) for chunk, index in table]
    backward = [
        Phase(False, chunks - 1 - chunk, index, index == micro_batches - 1)
        for chunk, index in table
    ]
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(forward))
    phases = forward[:ahead]
    for index, phase in enumerate(backward):
        if index + ahead < len(forward):
            phases.append(forward[index + ahead])
        phases.append(phase)
    return phases


def before(phase: Phase, stage: int, stages: int, chunks: int) -> tuple[int, int] | None:
    """Return stage and chunk that give this phase its input, None at an end of the model."""
    if phase.is_forward:
        if stage > 0:
            return stage - 1, phase.chunk
        return (stages - 1, phase.chunk - 1) if phase.chunk > 0 else None
    if stage < stages - 1:
        return stage + 1, phase.chunk
    return (0, phase.chunk + 1) if phase.chunk < chunks - 1 else None
