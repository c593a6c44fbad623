# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the settings of a run: the user's choices joined with Megatron's, once in each process."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.layout import FP32_NBYTES
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.engine.zero.construction import Construction
from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.flags.arguments import config_of, schedule_of
from megatron_asynchzp.mcore.flags.config import AUTO, AsyncHZPConfig, TraceRequest
from megatron_asynchzp.mcore.flags.pasa import CaptureRequest, PasaOptions
from megatron_asynchzp.mcore.flags.shard_sizes import node_size, sharding_ranks_per_node
from megatron_asynchzp.planner.memory import MomentBytes

_LIBRARY_WAITS_LONGER = timedelta(minutes=1)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MUONS = ("muon", "dist_muon")


class MomentDtypes(NamedTuple):
    """The dtypes in which Adam's two moments are stored."""

    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32

    @property
    def is_rounded(self) -> bool:
        return self != MomentDtypes()


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run with AsyncHZP, made once in a process, from argparse or otherwise."""

    sizes: ShardSizes  # of the dense sharding group; experts use their gcd with their own group
    config: AsyncHZPConfig = AsyncHZPConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    grad_dtype: torch.dtype = torch.float32  # in which gradients travel
    main_grad_dtype: torch.dtype = torch.float32  # in which a rank keeps the sums of its gradients
    moments: MomentDtypes = MomentDtypes()
    moment_nbytes: MomentBytes = MomentBytes()  # of an element, of the optimizer's states
    offload: float = 0.0  # part of the optimizer states that is on the host between two updates
    timeout: timedelta | None = None  # of the engine's communicators; None for torch's own
    starts_differ: bool = False  # ranks initialise differently, and the first rank's values count
    saves_beside_training: bool = False
    sends_codes: bool = False  # weights of layers in FP8 or FP4 are gathered as codes
    trace: TraceRequest | None = None  # of this rank
    ranks_per_node: int = 1
    communicator_file: str | None = None  # see --nccl-communicator-config-path
    number_of_step: Callable[[], int | None] = lambda: None  # see Communication

    @classmethod
    def of(cls, config: AsyncHZPConfig, megatron: Any, sizes: ShardSizes) -> "RunSettings":
        """Join the user's choices and their resolved `sizes` with Megatron's validated settings."""
        main_grad_dtype = _DTYPES[getattr(megatron, "asynchzp_main_grads_dtype", "fp32")]
        is_shorter = megatron.grad_reduce_in_bf16 or main_grad_dtype != torch.float32
        return cls(
            sizes,
            config,
            schedule_of(megatron, config),
            torch.bfloat16 if megatron.bf16 and is_shorter else torch.float32,
            main_grad_dtype,
            moments_of(megatron),
            moment_nbytes_of(megatron),
            getattr(megatron, "asynchzp_offload", 0.0),
            _timeout(megatron),
            megatron.data_parallel_random_init,
            megatron.async_save,
            getattr(megatron, "asynchzp_sends_codes", False),
            trace_of(config, megatron),
            node_size(megatron),
            megatron.nccl_communicator_config_path,
            partial(_number_of_step, megatron),
        )

    @classmethod
    def of_arguments(cls, args: Namespace) -> "RunSettings":
        """Make the settings of validated arguments; stock Megatron has sizes (1, 1, 1)."""
        config = config_of(args)
        given = config.shard_sizes.values()
        param, grad, optim = (1 if size in (None, AUTO) else int(size) for size in given)
        sizes = ShardSizes(param, grad, optim).with_short_axes(sharding_ranks_per_node(args))
        return cls.of(config, args, sizes)


@dataclass(frozen=True)
class Run:
    """The settings of this process, known since Megatron has validated its arguments."""

    megatron: Any  # Megatron's settings by name: they change while it trains (curr_iteration)
    settings: RunSettings | None  # None without --use-asynchzp
    attention: PasaOptions | None  # None without --use-pasa-attention
    capture: CaptureRequest | None
    config: AsyncHZPConfig | None = None  # of install(): settings come with the first optimizer
    seam: Any = None  # of install(): see Seam
    _built: tuple[ref[Construction], ...] = ()  # what building() began, until it is sharded

    # A process has one run, as its interpreter has one Megatron.
    _current: ClassVar["Run | None"] = None

    @classmethod
    def begin(cls, args: Namespace) -> None:
        """Make the run of validated arguments the run of this process."""
        is_ours = getattr(args, "use_asynchzp", False)
        has_attention = getattr(args, "use_pasa_attention", False)
        Run._current = cls(
            args,
            RunSettings.of_arguments(args) if is_ours else None,
            PasaOptions.of(args) if has_attention else None,
            CaptureRequest.of(getattr(args, "asynchzp_capture_attention", None)),
        )

    @classmethod
    def begin_installed(cls, config: AsyncHZPConfig, seam: Any) -> None:
        """Let the first optimizer that is made bring the settings of this process."""
        Run._current = cls(None, None, None, None, config, seam)

    @classmethod
    def note_construction(cls, construction: Construction) -> None:
        """Keep a model under construction for its optimizer, as long as the model is there."""
        run = Run._current
        assert run is not None
        Run._current = replace(run, _built=(*run._built, ref(construction)))

    def constructions(self) -> list[Construction]:
        """Return the models under construction that are there."""
        return [model for built in self._built if (model := built()) is not None]

    def meet_model(self, megatron: Any, settings: RunSettings) -> None:
        """Take the settings of a model; those of a second one must be the same."""
        for name in (field.name for field in fields(RunSettings) if self.settings is not None):
            was, now = getattr(self.settings, name), getattr(settings, name)
            if name != "number_of_step" and was != now:  # a function, equal to no other
                raise ConfigurationError(
                    f"a second model of this process needs {name} {now}, and the first one has "
                    f"{was}; give both the same settings, or train them in two processes"
                )
        Run._current = replace(self, megatron=megatron, settings=settings)

    @classmethod
    def current(cls) -> "Run | None":
        """Return the run of this process, None before Megatron has validated its arguments."""
        return Run._current

    @classmethod
    def current_settings(cls) -> RunSettings | None:
        """Return the settings of this process, None without --use-asynchzp."""
        return None if Run._current is None else Run._current.settings


def run_args() -> Any:
    """Return Megatron's settings by name, None without --use-asynchzp."""
    run = Run.current()
    return None if run is None or run.settings is None else run.megatron


def moments_of(megatron: Any) -> MomentDtypes:
    """Return the dtypes of Adam's moments, before and after the flags are translated."""
    words = getattr(megatron, "asynchzp_moment_dtypes", None)
    if words is None:  # stock Megatron
        return MomentDtypes(megatron.exp_avg_dtype, megatron.exp_avg_sq_dtype)
    return MomentDtypes(*(_DTYPES[word] for word in words))


def moment_nbytes_of(megatron: Any) -> MomentBytes:
    """Return the bytes of the optimizer's states, with --use-asynchzp or without."""
    if megatron.optimizer == "sgd":
        return MomentBytes(FP32_NBYTES if megatron.sgd_momentum else 0)
    nbytes = sum(dtype.itemsize for dtype in moments_of(megatron))
    return MomentBytes(nbytes, FP32_NBYTES if megatron.optimizer in _MUONS else None)


def trace_of(config: AsyncHZPConfig, megatron: Any) -> TraceRequest | None:
    """Return the trace of this rank. Raises ConfigurationError for a path that cannot be."""
    if config.trace is None or (stage := _stage_led(megatron)) is None:
        return None
    raise_first(config.faults_of_trace())
    path = Path(config.trace)
    if stage > 0:
        path = path.with_name(f"{path.stem}.stage{stage}{path.suffix}")
    return TraceRequest(path, megatron.train_iters)


def _stage_led(megatron: Any) -> int | None:
    """Return the pipeline stage whose first rank this is, None for every other rank."""
    stages = megatron.pipeline_model_parallel_size
    ranks = megatron.world_size // stages
    if megatron.use_tp_pp_dp_mapping:
        ranks = megatron.tensor_model_parallel_size * megatron.context_parallel_size
    stage, place = divmod(megatron.rank, ranks)
    return stage if place == 0 and stage < stages else None


def _number_of_step(megatron: Any) -> int | None:
    """Return the number of the step, None outside Megatron's training loop, which counts."""
    done = getattr(megatron, "curr_iteration", None)
    return None if done is None else done + 1


def _timeout(megatron: Any) -> timedelta:
    """Return a limit after the engine's own: a device's library ends the process, names no unit."""
    limit = timedelta(minutes=megatron.distributed_timeout_minutes)
    is_on_cpu = torch.accelerator.current_accelerator() is None
    return limit if is_on_cpu else limit + _LIBRARY_WAITS_LONGER
