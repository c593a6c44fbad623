# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what one command line gives: groups, states and memory of a rank of each pipeline stage."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_asynchzp.planning import group_kinds, pretended_world, states
from megatron_asynchzp.planning.group_kinds import GroupKind
from megatron_asynchzp.planning.states import StageStates
from megatron_asynchzp.mcore.planned import shard_sizes


@dataclass(frozen=True)
class Measured:
    """args: validated; lines: what --use-asynchzp changed; kinds: the groups of rank 0; stages: of
    each pipeline stage."""

    args: Namespace
    lines: list[str]
    ranks_per_node: int
    kinds: list[GroupKind]
    stages: list[StageStates]

    @property
    def parameters(self) -> int:
        return sum(stage.whole_numel for stage in self.stages)

    @property
    def fullest(self) -> StageStates:
        """The stage whose ranks need most."""
        return max(self.stages, key=lambda stage: stage.memory.total)


def measure(flags: tuple[str, ...], ranks: int, ranks_per_node: int) -> Measured:
    """Of flags that pretrain_gpt.py understands. Raises Refused for what cannot run."""
    parsed = pretended_world.parse(list(flags), ranks, ranks_per_node)
    return _measure(*parsed, ranks_per_node)


def measure_script(script: Path, flags: list[str], ranks: int, ranks_per_node: int) -> Measured:
    """Of any Megatron script. Raises Refused for what cannot run."""
    parsed = pretended_world.parse_script(script, flags, ranks, ranks_per_node)
    return _measure(*parsed, ranks_per_node)


def _measure(args: Namespace, lines: list[str], ranks_per_node: int) -> Measured:
    sizes = shard_sizes(args) if args.use_asynchzp else None
    measured = Measured(args, lines, ranks_per_node, [], [])
    for stage in pretended_world.stages(args):
        if not measured.kinds:
            measured.kinds.extend(mesh.group_kinds(stage, args, sizes))
        measured.stages.append(states.stage_states(stage, args, ranks_per_node))
    return measured
