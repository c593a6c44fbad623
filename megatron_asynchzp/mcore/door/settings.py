# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the settings of a run from AsyncHZPConfig and Megatron's dataclasses, by the rules."""

import copy
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron_asynchzp.engine.comm.agreement import text_of
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.flags.changes import OWN_SETTINGS
from megatron_asynchzp.mcore.flags.checks import faults_of_muon
from megatron_asynchzp.mcore.flags.config import (
    OPTIONS,
    STATES,
    AsyncHZPConfig,
    default_of,
    flag_of,
)
from megatron_asynchzp.mcore.flags.megatron_settings import MegatronSettings
from megatron_asynchzp.mcore.flags.rule_table import RULES
from megatron_asynchzp.mcore.flags.rules import OURS, changes, refuse, values_after
from megatron_asynchzp.mcore.flags.shard_sizes import (
    describe_cuts,
    describe_translation,
    resolve_shard_sizes,
    sharding_ranks_per_node,
)
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.mcore.start.low_precision import faults_of_machine
from megatron_asynchzp.mcore.start.shard_groups import communication_device

# Choices about things that a framework does by itself, or that the planner does before a run.
_USELESS = {
    "cluster": "give shard sizes as numbers, or leave them out",
    "verify": "the framework loads its checkpoints; run asynchzp verify before",
    "save_ranks": "each rank writes what it holds",
    "save_trained_only": "the framework decides what it saves",
    "adapter_rank": "it is for the planner of a Megatron-LM command line",
    "adapter_layers": "it is for the planner of a Megatron-LM command line",
}
_WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_MINUTES = 10.0


def check_choices_have_effect(config: AsyncHZPConfig) -> None:
    """Raise ConfigurationError for a choice without effect outside Megatron-LM's own scripts."""
    for name, remedy in _USELESS.items():
        if (value := getattr(config, name)) != default_of(name):
            raise ConfigurationError(
                f"{flag_of(name)} {value} has no effect in a framework: {remedy}"
            )


@dataclass(frozen=True)
class DoorSettings:
    """What a model and its optimizer are made with, after the rules."""

    megatron: MegatronSettings
    run: RunSettings
    optimizer: Any  # a changed copy of the OptimizerConfig
    ddp: Any  # a changed copy of the DistributedDataParallelConfig
    lines: list[str]  # to log on rank 0

    @classmethod
    def of(
        cls, config: AsyncHZPConfig, transformer: Any, optimizer: Any, ddp: Any, groups: Any
    ) -> "DoorSettings":
        """Apply the rules to the dataclasses. Raises ConfigurationError, one line.

        `groups` is Megatron's ProcessGroupCollection.
        """
        own = _own_settings(config, optimizer, ddp, groups)
        settings: Any = MegatronSettings(own, transformer, optimizer, ddp)
        refuse(RULES[OURS], settings)
        raise_first(_faults_of_dataclasses(transformer, optimizer))
        for faults in (faults_of_machine, faults_of_muon):
            raise_first(faults(settings))
        group_size = groups.dp_cp.size()
        sizes = _sizes(config, settings, group_size)
        rules = changes(RULES[OURS], settings)
        _check_built_so(rules, transformer, (own, optimizer, ddp), settings)
        lines = describe_translation(settings, sizes, group_size) + describe_cuts(sizes, group_size)
        lines += [rule.line(settings) for rule in rules if not rule.is_silent]
        if own.grad_reduce_in_bf16:
            lines.append(
                "gradients travel in bf16, as without grad_reduce_in_fp32, and are summed in fp32"
            )
        vars(own).update(OWN_SETTINGS | values_after(rules, settings))
        run = _run_settings(own, settings, sizes)
        changed = {rule.setting: rule.value for rule in rules}
        return cls(settings, run, _changed(optimizer, changed), _changed(ddp, changed), lines)


def settings_before_model(config: AsyncHZPConfig, groups: Any) -> RunSettings:
    """The settings by which a model is built in shards, with Megatron's defaults for the others."""
    configs = OptimizerConfig(), DistributedDataParallelConfig()
    own = _own_settings(config, *configs, groups)
    vars(own).update(OWN_SETTINGS)
    settings = MegatronSettings(own, *configs)
    return _run_settings(own, settings, _sizes(config, settings, groups.dp_cp.size()))


def _sizes(config: AsyncHZPConfig, settings: Any, group_size: int) -> ShardSizes:
    return resolve_shard_sizes(config, settings, group_size, sharding_ranks_per_node(settings))


def _run_settings(own: Namespace, settings: Any, sizes: ShardSizes) -> RunSettings:
    vars(own).update({f"asynchzp_{name}_shard_size": getattr(sizes, name) for name in STATES})
    return RunSettings.of(AsyncHZPConfig.of(vars(own)), settings, sizes)


def comparable(run: RunSettings, *configs: Any) -> dict[str, str]:
    """The settings in which all ranks of a run must agree, as text.

    `configs` are Megatron's dataclasses, whose functions and other objects are left out.
    """
    left_out = ("config", "trace", "number_of_step", "ranks_per_node")
    text = {f.name: repr(getattr(run, f.name)) for f in fields(run) if f.name not in left_out}
    for config in configs:
        text |= {
            f"{type(config).__name__}.{f.name}": text_of(value)
            for f in fields(config)
            if isinstance(value := getattr(config, f.name), _PLAIN)
        }
    return text | {flag_of(name): repr(getattr(run.config, name)) for name in OPTIONS}


def _faults_of_dataclasses(transformer: Any, optimizer: Any) -> Iterator[str]:
    """Name settings of two dataclasses that contradict each other, and one that comes too late."""
    for name in ("bf16", "fp16"):
        if (wanted := getattr(transformer, name)) != (value := getattr(optimizer, name)):
            yield (
                f"OptimizerConfig: {name} is {value}, and TransformerConfig's is {wanted}; give "
                "both the same"
            )
    if getattr(transformer, "hybrid_context_parallel", False):
        yield (
            "TransformerConfig: hybrid_context_parallel works in Megatron-LM's own scripts alone; "
            "set it to False"
        )
    if transformer.cuda_graph_impl == "local":
        yield (
            "TransformerConfig: cuda_graph_impl is local, and its layers have left the stream on "
            "which AsyncHZP works; use transformer_engine"
        )


def _own_settings(config: AsyncHZPConfig, optimizer: Any, ddp: Any, groups: Any) -> Namespace:
    """The settings by the names of arguments that no dataclass has, or has in another form."""
    pipeline, world = dist.get_process_group_ranks(groups.pp), dist.get_world_size()
    stages = len(pipeline)
    return Namespace(
        **{f"asynchzp_{name}": getattr(config, name) for name in OPTIONS},
        **{name: _WORDS.get(value := getattr(optimizer, name), value) for name in _DTYPES},
        world_size=world,
        rank=dist.get_rank(),
        tensor_model_parallel_size=groups.tp.size(),
        pipeline_model_parallel_size=stages,
        context_parallel_size=groups.cp.size(),
        use_tp_pp_dp_mapping=stages > 1 and pipeline[1] - pipeline[0] != world // stages,
        grad_reduce_in_bf16=bool(optimizer.bf16 and not ddp.grad_reduce_in_fp32),
        # The sums of ranks that start differently would be of no model: the first rank's count.
        data_parallel_random_init=True,
        async_save=True,  # a framework decides at each save
        dist_ckpt_strictness="log_all",  # as a framework's, which may ask for any
        # As stock optimizers do; a framework's scheduler writes its own rates afterwards.
        use_checkpoint_opt_param_scheduler=True,
        distributed_timeout_minutes=_timeout_minutes(groups.dp_cp),
        log_interval=10,
        ddp_param_name_patterns_for_fp32_local_accumulation=[
            *getattr(ddp, "param_name_patterns_for_fp32_local_accumulation", ())
        ],
    )


def _timeout_minutes(group: dist.ProcessGroup) -> float:
    options: Any = getattr(group._get_backend(communication_device(group)), "options", None)
    return _MINUTES if options is None else options._timeout.total_seconds() / 60


def _check_built_so(
    rules: Any, transformer: Any, others: tuple[Any, ...], settings: MegatronSettings
) -> None:
    """Raise ConfigurationError for a change that comes after the layers were built."""
    built, later = MegatronSettings(transformer), MegatronSettings(*others)
    for rule in rules:
        if built.has(rule.setting) and not later.has(rule.setting):
            raise ConfigurationError(
                f"TransformerConfig: {rule.setting} is {getattr(settings, rule.setting)}, and "
                f"AsyncHZP needs {rule.value}: {rule.reason}; set it before the model is built"
            )


def _changed(config: Any, values: dict[str, Any]) -> Any:
    """A copy of a dataclass with those of `values` that it has. Its own checks ran already."""
    changed = copy.copy(config)
    dtypes = {word: dtype for dtype, word in _WORDS.items()}
    for setting, value in values.items():
        for holder, name in MegatronSettings(changed).places(setting):
            if hasattr(holder, name):
                setattr(holder, name, dtypes[value] if setting in _DTYPES else value)
    if hasattr(changed, "use_precision_aware_optimizer_no_fp8_or_ds_fp8"):
        changed.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    return changed
