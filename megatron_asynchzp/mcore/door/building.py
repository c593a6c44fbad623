# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`building`, within which a framework's model is built in shards, before its optimizer is made."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_asynchzp.engine.zero.construction import Construction
from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.door.settings import settings_before_model
from megatron_asynchzp.mcore.run.settings import Run, RunSettings
from megatron_asynchzp.mcore.start.construction import constructing


@contextmanager
def building(pg_collection: ProcessGroupCollection | None = None) -> Iterator[None]:
    """Let a rank hold its shards, and at most two whole units, of the model that is built within.

    All chunks of a rank are built within one. Until the optimizer is made, within and afterwards,
    ranks use weights through the parameters, in the same order, and write the same values.
    Afterwards the model may be called.

    Args:
        pg_collection: Megatron's process groups, if they are not the global ones.

    Raises:
        ConfigurationError: Without install(), or for shard sizes that the groups cannot have.
    """
    if (run := Run.current()) is None or run.config is None:
        raise ConfigurationError("building() without install(): call install() first")
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    settings = settings_before_model(run.config, groups)
    has_experts = groups.ep.size() > 1
    with constructing(settings, groups, has_experts, reshards=True) as construction:
        Run.note_construction(construction)
        yield


def is_built_in_shards(params: Sequence[nn.Parameter]) -> bool:
    """Whether a rank holds shards of parameters that have no optimizer yet."""
    return bool(_constructions_of(params))


def take_construction(params: Sequence[nn.Parameter], settings: RunSettings) -> Construction | None:
    """Return the construction of `params`, None if they are whole.

    Raises ConfigurationError if they were built in other shards than those of `settings`.
    """
    constructions = _constructions_of(params)
    raise_first(_faults_of_building(constructions, settings))
    for construction in constructions:
        for key, groups in construction.groups.items():
            construction.groups[key] = replace(
                groups, grad_dtype=settings.grad_dtype, main_grad_dtype=settings.main_grad_dtype
            )
        return construction
    return None


def _constructions_of(params: Sequence[nn.Parameter]) -> list[Construction]:
    run = Run.current()
    constructions = [] if run is None else run.constructions()
    for construction in constructions:
        construction.reshard()
    return [model for model in constructions if any(map(model.holds, params))]


def _faults_of_building(
    constructions: Sequence[Construction], settings: RunSettings
) -> Iterator[str]:
    if len(constructions) > 1:
        yield (
            f"the chunks of a model were built within {len(constructions)} building() contexts; "
            "build them within one"
        )
    for construction in constructions:
        built, asked = construction.groups["dense"].topology.sizes, settings.sizes
        if built != asked:
            yield (
                f"a model was built in shards of P, G, O {built.param}, {built.grad}, "
                f"{built.optim}, and its DistributedDataParallelConfig asks for {asked.param}, "
                f"{asked.grad}, {asked.optim}; give install() the shard sizes"
            )
