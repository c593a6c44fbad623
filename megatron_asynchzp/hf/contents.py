# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Lists the tensors of a whole model in their order of use, and refuses models with others.

The export of a checkpoint and the stream of a running model share it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.config import write_config
from megatron_asynchzp.hf.mapping import LAYERS, OTHER_KEYS, TensorRule, rules_of
from megatron_asynchzp.hf.output_folder import complete_or_absent
from megatron_asynchzp.hf.safetensors_folder import TensorInfo, write_folder
from megatron_asynchzp.hf.shape import ModelShape, describe_difference

_FIRST = "embedding."


class Job(NamedTuple):
    """A tensor of Megatron to convert."""

    rule: TensorRule
    place: tuple[int, ...]  # (), (layer,) or (layer, expert)

    @property
    def names(self) -> tuple[str, ...]:
        return self.rule.names_of(self.place)

    @property
    def part(self) -> tuple[int, ...]:
        """Sorts by use: (0,) before all layers, (1, layer), (2,) after all layers."""
        if self.rule.key.startswith(LAYERS):
            return (1, self.place[0])
        return (0,) if self.rule.key.startswith(_FIRST) else (2,)

    def convert(self, whole: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.rule.to_hf(whole, shape), strict=True)


def jobs_in_order_of_use(shape: ModelShape) -> list[Job]:
    jobs = [Job(rule, place) for rule in rules_of(shape) for place in rule.places(shape)]
    return sorted(jobs, key=lambda job: job.part)


def write_model(
    output: Path,
    shape: ModelShape,
    dtype_of: Callable[[TensorRule], torch.dtype],
    tensors: Iterable[tuple[str, Tensor]],
    max_file_nbytes: int,
) -> None:
    """Write tensors, which come in order of use, as a Hugging Face directory or not at all.

    dtype_of gives the dtype in which the tensors of a rule come and are written.
    """
    infos = {
        name: TensorInfo(size, dtype_of(job.rule))
        for job in jobs_in_order_of_use(shape)
        for name, size in zip(job.names, job.rule.hf_sizes(shape), strict=True)
    }
    with complete_or_absent(output) as folder:
        write_config(shape, folder, dtype_of(rules_of(shape)[0]))
        write_folder(folder, infos, tensors, max_file_nbytes)


def match_keys(
    source: str, sizes: Mapping[str, Collection[int]], shape: ModelShape
) -> dict[str, str]:
    """Return the model's key for the tensor of each rule, by the rule's key.

    Args:
        source: Names the model in messages.
        sizes: Of all tensors of the model, by key, with layers and experts stacked.
        shape: Of the model. Tensors or sizes that differ are a ConfigurationError.
    """
    matched, missing = {}, []
    for rule in rules_of(shape):
        key = next((k for k in (rule.key, OTHER_KEYS.get(rule.key)) if k in sizes), None)
        if key is None:
            missing.append(rule.key)
            continue
        matched[rule.key] = key
        wanted = [*rule.stack(shape), *rule.megatron_size(shape)]
        if list(sizes[key]) != wanted:
            raise ConfigurationError(
                f"{key} has size {list(sizes[key])}, but {wanted} by the arguments"
            )
    twins = {rule.twin for rule in rules_of(shape)}
    foreign = sorted(set(sizes) - set(matched.values()) - twins)
    if missing or foreign:
        raise ConfigurationError(describe_difference(source, shape, missing, foreign))
    return matched
