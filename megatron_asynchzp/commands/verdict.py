# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a start says of a training command, by the code of a start, and its sharding."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest import mock

from megatron_asynchzp.commands import pretended_world
from megatron_asynchzp.commands.recipes import without_flag
from megatron_asynchzp.commands.stages import plain_memory
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.command_line import check_command_line
from megatron_asynchzp.mcore.flags.config import AsyncHZPConfig
from megatron_asynchzp.mcore.flags.rule_table import RULES
from megatron_asynchzp.mcore.flags.rules import OURS, Refused, Rule
from megatron_asynchzp.mcore.flags.shard_sizes import (
    held_sizes,
    resolve_shard_sizes,
    sharding_group_size,
    sharding_ranks_per_node,
    weight_shards,
)
from megatron_asynchzp.mcore.run import planned
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.planner.cluster import GIB, Cluster
from megatron_asynchzp.planner.contenders import (
    DISTRIBUTED_OPTIMIZER,
    FSDP2,
    GTP,
    MEGATRON_FSDP,
    PLAIN_DATA_PARALLELISM,
    Contender,
)
from megatron_asynchzp.planner.costs import Costing

# Megatron wants 1 with tensor parallelism on Hopper, anything else with its own FSDP.
_CONNECTIONS = ("1", "8")
# What Megatron's own checks ask of the environment by name, and refuse to start without.
_ASKED = ("NVTE_CPU_OFFLOAD_V1",)
_IN_ENVIRONMENT = "it has to be in the environment, or Megatron refuses to start"


class Line(NamedTuple):
    """The reason why a command does not start."""

    text: str
    by: str  # The flag that --use-asynchzp refuses; "" if Megatron refuses.


@dataclass(frozen=True)
class StartVerdict:
    """The verdict of a start on a command line."""

    refused: list[Line]  # All lines; a start prints the first.
    args: Namespace | None  # Validated, without refused flags; None if Megatron still refuses.
    logged: list[str]  # Lines on changed arguments.

    @property
    def changed(self) -> list[Rule]:
        return [rule for rule in RULES[OURS] if rule.is_in(self.logged)]

    @property
    def lost(self) -> list[Rule]:
        return [rule for rule in self.changed if rule.is_lost]

    @property
    def environment(self) -> list[str]:
        """Lines on variables that the environment needs; the rest was judged with them."""
        return [line for line in self.logged if line.endswith(_IN_ENVIRONMENT)]


def validate_command(
    command: Sequence[str], ranks: int, ranks_per_node: int
) -> tuple[Namespace, list[str]] | ConfigurationError:
    """Return validated arguments and log lines, or the refusal; the script may be missing."""
    refusal = None
    environments = [{"CUDA_DEVICE_MAX_CONNECTIONS": number} for number in _CONNECTIONS]
    for environment in environments:  # grows below
        with mock.patch.dict("os.environ", environment):
            try:
                try:
                    check_command_line(command[1:], ranks)
                except ConfigurationError as error:
                    raise ConfigurationError(str(error)) from error
                args, lines = pretended_world.parse_command(command, ranks, ranks_per_node)
            except ConfigurationError as error:
                # A refusal despite the requested flag is the reason.
                refusal = error if environment.keys() & {*_ASKED} else refusal or error
                asked = [name for name in _ASKED if f"{name} should" in str(error)]
                if more := dict.fromkeys(asked, "1").items() - environment.items():
                    environments.append(environment | dict(more))
                continue
            needed = [name for name in _ASKED if name in environment]
            return args, [*lines, *(f"{name} = 1: {_IN_ENVIRONMENT}" for name in needed)]
    assert refusal is not None
    return refusal


def lines_of(refusal: ConfigurationError) -> list[Line]:
    """Return a line for each row of a table that refuses, or the one line."""
    if isinstance(refusal.__cause__, Refused):
        cause = refusal.__cause__
        return [Line(text, row.flag) for text, row in zip(cause.lines, cause.rows)]
    first = str(refusal).split()[0]
    is_ours = isinstance(refusal.__cause__, ConfigurationError) and first.startswith("--")
    return [Line(str(refusal), first if is_ours else "")]


def judge_command(command: Sequence[str], ranks: int, ranks_per_node: int) -> StartVerdict:
    """Collect all refusals: a flag that alone decides one is left out, and the rest asked again."""
    words, refused = [*command, OURS], list[Line]()
    while isinstance(answer := validate_command(words, ranks, ranks_per_node), ConfigurationError):
        refused += [line for line in lines_of(answer) if line not in refused]
        fewer = words
        for row in answer.__cause__.rows if isinstance(answer.__cause__, Refused) else ():
            if row.is_decided_by_flag:
                fewer = without_flag(fewer, row.flag)
        if fewer == words:
            return StartVerdict(refused, None, [])
        words = fewer
    return StartVerdict(refused, *answer)


@dataclass(frozen=True)
class Row:
    """A row of the table of shardings."""

    title: str
    costing: Costing
    at_rest: float  # Bytes of a rank.
    peak: float  # Bytes of a rank.
    # Whether the peak lacks what another system holds beyond its states and activations.
    is_least: bool
    step_s: float | None  # Predicted, None without a cluster.

    @property
    def cells(self) -> list[str]:
        sizes = self.costing.plan.sizes
        three = f"{sizes.param}, {sizes.grad}, {sizes.optim}"
        peak = f"{'>= ' * self.is_least}{self.peak / GIB:.2f}"
        step = f"{self.step_s:.3f}" if self.step_s else "-"
        return [self.title, three, f"{self.at_rest / GIB:.2f}", peak, step]


def _system_of(given: Namespace) -> Contender:
    if given.use_torch_fsdp2:
        return FSDP2
    if given.use_megatron_fsdp:
        return MEGATRON_FSDP
    if weight_shards(given):
        return GTP
    is_sharded = given.use_distributed_optimizer
    return DISTRIBUTED_OPTIMIZER if is_sharded else PLAIN_DATA_PARALLELISM


def shardings(
    args: Namespace, given: Namespace, cluster: Cluster | None, per_node: int
) -> list[Row]:
    """Return the user's own sharding, ours in its place, and the default sizes.

    args: validated; given: as the user has them, without --use-asynchzp; cluster: for times.
    """
    setting, group = planned.setting_of(args), sharding_group_size(args)
    on_node = sharding_ranks_per_node(args, per_node)
    costing = planned.costing_of(args, setting)
    costing = replace(costing, cluster=cluster or costing.cluster)
    default = resolve_shard_sizes(AsyncHZPConfig(), args, group, on_node)
    becomes = RunSettings.of_arguments(args).sizes
    rows = [("yours", held_sizes(given, group)), (OURS, becomes)]
    if replace(default, cuts=()) != replace(becomes, cuts=()):
        rows.append((f"{OURS}, default sizes", default))
    table = []
    for title, sizes in rows:
        is_ours, sizes = title != "yours", replace(sizes, cuts=()).with_short_axes(on_node)
        candidate = costing.with_sizes(sizes)
        in_bf16 = given.grad_reduce_in_bf16 or "bf" in str(given.main_grads_dtype)
        grad = None if is_ours else 2 if in_bf16 else 4
        stages = range(candidate.plan.parallel.pp)
        memories = [plain_memory(candidate, index, grad) for index in stages]
        system = None if is_ours else _system_of(given)
        if system is not None:
            candidate = replace(candidate, plan=system.plan(candidate.plan), known={})
            title += f" ({system.name})"
        step_s = candidate.step().step_s if cluster is not None and candidate.has_room else None
        held = max(memory.states for memory in memories)
        peak = candidate.memory.total if is_ours else max(memory.total for memory in memories)
        table.append(Row(title, candidate, held, peak, not is_ours, step_s))
    return table
