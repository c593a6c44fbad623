# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a framework on megatron.core gets where it wraps a model and makes its optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any
from weakref import ref

import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.door.building import take_construction
from megatron_asynchzp.mcore.door.settings import DoorSettings, comparable
from megatron_asynchzp.mcore.door.wrapper import NO_OPTIMIZER, DoorDataParallel
from megatron_asynchzp.mcore.patches.model import Seam
from megatron_asynchzp.mcore.patches.patch import Patch, replaces
from megatron_asynchzp.mcore.patches.table import PATCHES
from megatron_asynchzp.mcore.run.agreement import check_ranks_agree
from megatron_asynchzp.mcore.run.settings import Run
from megatron_asynchzp.mcore.start.start_table import format_start_table
from megatron_asynchzp.mcore.step.data_parallel import is_true_anywhere, shard_chunks
from megatron_asynchzp.mcore.step.optimizer import get_asynchzp_optimizer
from megatron_asynchzp.mcore.step.qk_clip import refuse_unknown_attention

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"


def make_optimizer(given: Mapping[str, Any]) -> Any:
    """Shard the chunks of a model and make their optimizer, of get_megatron_optimizer's arguments.

    Raises ConfigurationError.
    """
    chunks, overrides = given["model_chunks"], given["config_overrides"]
    raise_first(_faults_of_call(chunks, given["dump_param_to_param_group_map"]))
    groups = given["pg_collection"] or chunks[0].given_groups
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    settings = _shard(chunks, given["config"], groups)
    optimizer = get_asynchzp_optimizer(
        settings.optimizer, chunks, overrides, groups, settings.run.moments
    )
    for chunk in chunks:
        chunk.optimizer = ref(optimizer)
    return optimizer


SEAM = Seam(DoorDataParallel, make_optimizer)


def _faults_of_call(chunks: Sequence, map_path: str | None) -> Iterator[str]:
    for chunk in chunks:
        if not isinstance(chunk, DoorDataParallel):
            yield (
                f"a model is wrapped with {type(chunk).__name__}, which AsyncHZP does not shard; "
                "wrap it with megatron.core's DistributedDataParallel after install(), or leave "
                "install() out"
            )
    if map_path:
        yield (
            "dump_param_to_param_group_map is not supported with AsyncHZP: the map is written by "
            "Megatron's own optimizer, which is not used; leave it out"
        )


@replaces(
    "megatron.core.optimizer._get_param_groups",
    "model_chunks config config_overrides",
    why="a name that was bound before install() would give a whole model a stock optimizer",
    drop_when="as above",
)
def keep_from_stock_optimizer(original: Callable, model_chunks: Sequence, *args: Any, **more: Any):
    if any(isinstance(chunk, DoorDataParallel) and not chunk.is_sharded for chunk in model_chunks):
        raise ConfigurationError(NO_OPTIMIZER)
    return original(model_chunks, *args, **more)


@replaces(
    f"{_OPTIMIZER}.compute_full_param_layout",
    "params bucket_size data_parallel_world_size ddp_config expert_data_parallel_world_size",
    why="frameworks lay out buffers, which our wrapper lacks: each unit would be gathered for it",
    drop_when="as above",
)
def lay_out_no_buffers(*_: Any, **__: Any) -> None:
    return None


def _shard(chunks: Sequence[DoorDataParallel], config: Any, groups: Any) -> DoorSettings:
    """Shard the chunks of a model, if they are not yet. Collective over the world."""
    run, first = Run.current(), chunks[0]
    assert run is not None and run.config is not None
    settings = DoorSettings.of(run.config, first.config, config, first.ddp_config, groups)
    check_ranks_agree(comparable(settings.run, first.config, config, first.ddp_config))
    params = [param for chunk in chunks for param in chunk.parameters()]
    if not is_true_anywhere(any(param.requires_grad for param in params)):
        raise ConfigurationError(
            "no parameter of the model needs a gradient, so there is nothing to train; call "
            "requires_grad_() on those to train before the optimizer is made"
        )
    construction = take_construction(params, settings.run)
    run.meet_model(settings.megatron, settings.run)
    if first.is_sharded:
        return settings
    for chunk in chunks:
        chunk.ddp_config = settings.ddp
    shard_chunks(chunks, groups, settings.run, construction)
    for chunk in chunks:
        chunk.note_sharded(chunks)
    if settings.megatron.qk_clip:
        refuse_unknown_attention(chunks)
    if dist.get_rank() == 0:
        table = format_start_table(chunks, settings.run, construction)
        lines = [f"megatron_asynchzp: {line}" for line in settings.lines]
        print(*lines, table, sep="\n", flush=True)
    return settings


def _works_without_arguments(patch: Patch) -> bool:
    """Whether a patch is of megatron.core or torch, and needs no flags of Megatron-LM."""
    is_of_script = patch.target.startswith("megatron.training.")
    return not is_of_script and patch.attribute != "initialize_model_parallel"


def door_patches() -> list[Patch]:
    """Return the patches, without functions of torch that a framework has replaced by its own."""

    def is_free(patch: Patch) -> bool:
        if not patch.target.startswith("torch."):
            return True
        return getattr(import_module(patch.module), patch.attribute).__module__ == patch.module

    needed = filter(_works_without_arguments, PATCHES)
    own = [keep_from_stock_optimizer]
    if hasattr(DistributedOptimizer, lay_out_no_buffers.attribute):  # not in 0.18
        own.append(lay_out_no_buffers)
    return [*own, *filter(is_free, needed)]
