# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Order of micro-batches on a pipeline stage: Megatron's 1F1B, plain and interleaved."""

from megatron_asynchzp.planner.program import Phase


def stage_phases(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Phase]:
    """Return the phases of a step.

    Raises:
        ValueError: There are several chunks, and `micro_batches` is not a multiple of `stages`, as
            Megatron requires.
    """
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
    """Return stage and chunk whose phase of the same micro-batch gives this phase its input.

    None at the begin of the model, or of its backward.
    """
    if phase.is_forward:
        if stage > 0:
            return stage - 1, phase.chunk
        return (stages - 1, phase.chunk - 1) if phase.chunk > 0 else None
    if stage < stages - 1:
        return stage + 1, phase.chunk
    return (0, phase.chunk + 1) if phase.chunk < chunks - 1 else None
