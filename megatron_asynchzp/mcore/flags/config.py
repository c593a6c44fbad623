# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the user's choices about a run, with defaults, checks and help. Loads no torch."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_asynchzp.engine.schedule import (
    AUTO,
    DEFAULT_GRAD_SLOT_NBYTES,
    EARLY_UPDATES,
    SCHEDULES,
    ScheduleConfig,
)
from megatron_asynchzp.errors import ConfigurationError, no_file_at, raise_first
from megatron_asynchzp.planner.cluster_files import load_cluster

STATES = ("param", "grad", "optim")
ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Projections of a layer that may have an adapter, as the planner knows them."""
NODE, WORLD = "node", "world"
"""Rules for a shard size, which give a number for any number of nodes."""
_MIB, _GIB = 2**20, 2**30
_ALIKE = 0.93  # how alike the name of a variable is to the one that was meant


# ---- readers of a value, or of a word of a command line


def whole_from(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not str(value).isdecimal() or int(value) < least:
            raise ValueError(f"{value} is not a whole number from {least}")
        return int(value)

    return read


def number_or(words: Sequence[str], number: type[int] | type[float], unit: str) -> Callable:
    """Read a number of `unit`, or one of `words`, which the run replaces by a number."""

    def read(value: Any) -> float | str:
        if value in words:
            return value
        try:
            return number(value)
        except ValueError:
            allowed = f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]
            raise ValueError(f"{value} is neither a number of {unit} nor {allowed}") from None

    return read


_RANKS = number_or((AUTO, NODE, WORLD), int, "ranks")

# Late enough for the order of units to be known and for allocations to be over.
_TRACED_STEP = 10


@dataclass(frozen=True)
class TraceRequest:
    """A step of a run to be written to `path`."""

    path: Path
    num_steps: int | None = None  # of the run and of those that it goes on from; None: unknown

    def step_after(self, first: int) -> int:
        """Return the step to write in a run that begins with the step `first`: its tenth."""
        # A shorter run writes its last but one: a trace ends with the work after its step, and
        # after the last step that may be an evaluation.
        if self.num_steps is None:
            return first + _TRACED_STEP - 1
        return max(first, min(first + _TRACED_STEP, self.num_steps) - 1)


# ---- the choices


def option(
    text: str,
    default: Any = False,
    read: Callable[[Any], Any] | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    flag: str | None = None,
    is_list: bool = False,
) -> Any:
    """Make a field of AsyncHZPConfig, a choice of the user.

    text: the help of its flag, without the default where `text` has no "Default:".
    read: makes a value of a word; without it words stay, and True and False are a switch.
    flag: another name than that of the field.
    """
    asked = {"text": text, "read": read, "choices": choices, "metavar": metavar, "flag": flag}
    return field(default=default, metadata=asked | {"is_list": is_list})


def _shard_size(held: str, default: str) -> Any:
    return option(
        f"Ranks (data x context parallel) that share one copy of the {held}; node: those of the "
        "sharding group on one node; world: the whole sharding group; auto: as many as the planner "
        f"finds best on --asynchzp-cluster. Default: {default}.",
        None,
        _RANKS,
        metavar="RANKS",
    )


def _kept(kept: str, read: Callable[[Any], Any], more: str = "") -> Any:
    return option(
        f"Memory budget of a rank, in addition to what is in flight, for {kept} from one "
        f"micro-batch to a later one, with pipelines and gradient accumulation.{more} Default: 0.",
        0.0,
        read,
        metavar="GIB",
    )


@dataclass(frozen=True)
class AsyncHZPConfig:
    """The choices of a user about a run with AsyncHZP. A field is the flag --asynchzp-<field>.

    Raises ConfigurationError, which names the flag, for a value that no run can have.
    """

    param_shard_size: int | str | None = _shard_size("parameters", NODE)
    grad_shard_size: int | str | None = _shard_size("gradients", NODE)
    optim_shard_size: int | str | None = _shard_size("main parameters and optimizer state", WORLD)
    cluster: str | None = option(
        "The cluster for the planner: a name, or a file that describes one. Shard sizes that are "
        "auto need it; the planner then also chooses those that are not given. Default: none.",
        None,
        metavar="NAME_OR_FILE",
    )
    schedule: str = option(
        "Which thread issues the collectives: the one that computes, ahead of their use "
        "(main-thread) or when they are needed (inline), or on a CPU background threads "
        "(threaded). Default: threaded on a CPU, else main-thread (auto).",
        AUTO,
        choices=(AUTO, *SCHEDULES),
    )
    prefetch_depth: int = option(
        "Units of each size that are gathered ahead of the one that computes. Default: 1.",
        1,
        whole_from(0),
        metavar="UNITS",
    )
    memory_in_flight_gb: float | None = option(
        "Upper bound on a rank's memory for gathered parameters and for gradients that are being "
        "reduced, shared equally by its model chunks. A lower bound makes gathers start later. "
        "Default: what two layers of each size need (in the start table).",
        None,
        float,
        metavar="GIB",
    )
    grad_slot_mb: float = option(
        "The largest piece of a unit's fp32 gradients that one collective reduces; with gradient "
        "accumulation fusion a unit is always one piece. Default: "
        f"{DEFAULT_GRAD_SLOT_NBYTES // _MIB}.",
        DEFAULT_GRAD_SLOT_NBYTES / _MIB,
        float,
        metavar="MIB",
    )
    keep_params_gb: float | str = _kept(
        "parameters that stay gathered", number_or((AUTO,), float, "GiB"), " auto: free memory."
    )
    keep_grads_gb: float = _kept("gradients that stay unreduced", float)
    early_update: str = option(
        "Send updated parameters while backward goes on, before the norm of the gradients is "
        "known; a step that is clipped or skipped sends them again. The results are the same. "
        "auto: as many as backward has room for, while steps are not clipped; on: all; off: none. "
        "Default: auto.",
        AUTO,
        choices=EARLY_UPDATES,
    )
    check_order: bool = option(
        "Do not compare, once per step, which collectives the ranks issued in which order. "
        "Default: compare.",
        True,
        flag="--no-asynchzp-check-order",
    )
    trace: str | None = option(
        "Write a Chrome trace of one step of rank 0: the tenth after its start, or the last but "
        "one. With a pipeline the first rank of each further stage N writes its own, as FILE with "
        ".stageN before the suffix. Default: no trace.",
        None,
        metavar="FILE",
    )
    verify: str = option(
        "What --load reads to find damage before it loads: the CRC-32 of every record (full), or "
        "manifest, sizes and zip directories without the data (structure). Default: full.",
        "full",
        choices=("full", "structure"),
    )
    save_ranks: int | None = option(
        "The most ranks that write the optimizer states of a layer; the others send them theirs, "
        "layer by layer. More ranks make more files and parts of tensors. Default: 64, divided by "
        "the tensor- and expert-parallel ranks of a layer.",
        None,
        whole_from(1),
        metavar="RANKS",
    )
    save_trained_only: bool = option(
        "Save only trained parameters (adapters). --load of such a checkpoint takes the frozen "
        "rest from --pretrained-checkpoint. Default: save the whole model."
    )
    adapter_rank: int | None = option(
        "For the planner, the dry run and shard sizes that are auto: the script freezes the model "
        "and adds low-rank adapters of this rank. A run that trains other parameters is refused. "
        "Default: the whole model is trained.",
        None,
        whole_from(1),
        metavar="RANK",
    )
    adapter_layers: tuple[str, ...] = option(
        "The projections of each layer that have an adapter. Default: all.",
        ADAPTED,
        choices=ADAPTED,
        is_list=True,
    )
    device: str = option(
        "auto: the accelerator, or the CPU platform without one; cpu: always the CPU. auto refuses "
        "a machine with an accelerator that torch does not see. Default: auto.",
        AUTO,
        choices=(AUTO, "cpu"),
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "AsyncHZPConfig":
        """Make a config of settings by the names that argparse gives them."""
        values: dict[str, Any] = {}
        for name in OPTIONS:
            value = given.get(f"asynchzp_{name}", default_of(name))
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    @classmethod
    def of_environment(cls) -> "AsyncHZPConfig":
        """Make a config of variables: ASYNCHZP_PARAM_SHARD_SIZE=2 and so on.

        Raises ConfigurationError for a value that no run can have, and for a misspelt name.
        """
        known = {name.upper(): name for name in OPTIONS}
        values: dict[str, Any] = {}
        for variable, word in os.environ.items():
            prefix, _, name = variable.partition("ASYNCHZP_")
            if prefix or not name:
                continue
            if name in known:
                values[known[name]] = _value_of_word(variable, known[name], word)
            elif meant := get_close_matches(name, known, 1, _ALIKE):
                raise ConfigurationError(f"{variable}: unknown; did you mean ASYNCHZP_{meant[0]}?")
        return cls(**values)

    def __post_init__(self) -> None:
        raise_first(self._faults())

    def _faults(self) -> Iterator[str]:
        for name, made in OPTIONS.items():
            value, flag = getattr(self, name), flag_of(name)
            if value == default_of(name):
                continue
            yield from _faults_of(flag, value, made.metadata["read"], made.metadata["choices"])
        for name in ("grad_slot_mb", "memory_in_flight_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                yield f"{flag_of(name)} {value:g}: give a size larger than 0"
        for name in ("keep_params_gb", "keep_grads_gb"):
            value = getattr(self, name)
            if value != AUTO and not 0 <= value < math.inf:
                yield f"{flag_of(name)} {value:g}: give the GiB that may be used, or 0 for none"
        for state in self.states_of_size(AUTO) if self.cluster is None else ():
            yield (
                f"--asynchzp-{state}-shard-size auto: give --asynchzp-cluster NAME_OR_FILE, for "
                "which the size is chosen, or a number of ranks"
            )

    def faults_of_run(self, world_size: int | None) -> Iterator[str]:
        """Name a choice that a run of `world_size` ranks cannot have, or files that cannot be."""
        yield from self.faults_of_trace()
        yield from self.faults_of_cluster()
        for state, size in self.shard_sizes.items():
            if isinstance(size, int) and world_size and (size < 1 or world_size % size):
                valid = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
                yield (
                    f"{flag_of(f'{state}_shard_size')} {size} does not divide the {world_size} "
                    f"ranks of the run; valid values: {valid}, or node, which fits any number"
                )

    def faults_of_cluster(self) -> Iterator[str]:
        if self.cluster is None:
            return
        if not self.states_of_size(AUTO):
            yield (
                f"--asynchzp-cluster {self.cluster} has no effect without a shard size that is "
                "auto; add --asynchzp-param-shard-size auto, or leave it out"
            )
        try:
            load_cluster(self.cluster)
        except ConfigurationError as error:
            yield f"--asynchzp-cluster {error}"

    def faults_of_trace(self) -> Iterator[str]:
        if self.trace is not None and (fault := no_file_at(Path(self.trace))):
            yield f"--asynchzp-trace {self.trace}: {fault}"

    @property
    def shard_sizes(self) -> dict[str, int | str | None]:
        return {state: getattr(self, f"{state}_shard_size") for state in STATES}

    def states_of_size(self, *words: str) -> list[str]:
        return [state for state, size in self.shard_sizes.items() if size in words]

    def schedule_config(
        self, num_chunks: int = 1, time_limit_s: float = 600.0, timed_every: int = 10
    ) -> ScheduleConfig:
        """Return the engine's schedule for a rank whose `num_chunks` chunks share its memory."""
        bound = self.memory_in_flight_gb
        return ScheduleConfig(
            self.schedule,
            self.prefetch_depth,
            None if bound is None else int(bound * _GIB) // num_chunks,
            int(self.grad_slot_mb * _MIB),
            time_limit_s=time_limit_s,
            checks_order=self.check_order,
            timed_every=timed_every,
            keep_params_nbytes=0 if self.keep_params_gb == AUTO else _nbytes(self.keep_params_gb),
            keep_grads_nbytes=_nbytes(self.keep_grads_gb),
            keeps_params_in_free_memory=self.keep_params_gb == AUTO,
            early_update=self.early_update,
        )


OPTIONS: dict[str, Field] = {one.name: one for one in fields(AsyncHZPConfig)}


def default_of(name: str) -> Any:
    return OPTIONS[name].default


def flag_of(name: str) -> str:
    return OPTIONS[name].metadata["flag"] or f"--asynchzp-{name.replace('_', '-')}"


def _faults_of(
    flag: str, value: Any, read: Callable | None, choices: Sequence[str]
) -> Iterator[str]:
    for word in value if isinstance(value, tuple) else (value,):
        if choices and word not in choices:
            yield f"{flag} {word}: give one of {', '.join(choices)}"
    try:
        if read is not None:
            read(value)
    except (ValueError, TypeError) as error:
        yield f"{flag}: {error}"


def _value_of_word(variable: str, name: str, word: str) -> Any:
    default, read = default_of(name), OPTIONS[name].metadata["read"]
    if isinstance(default, bool):
        if word not in ("0", "1"):
            raise ConfigurationError(f"{variable}={word}: give 1 or 0")
        return word == "1"
    if isinstance(default, tuple):
        return tuple(word.split())
    try:
        return word if read is None else read(word)
    except ValueError as error:
        raise ConfigurationError(f"{variable}={word}: {error}") from error


def _nbytes(gib: Any) -> int:
    return int(gib * _GIB)
