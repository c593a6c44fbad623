# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what a model of Megatron is in transformers, as a whole: which tensors, in what order, and
the refusal of models that have others. A checkpoint's export and the stream of a running model
share it.
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
    """One tensor of Megatron to convert: a rule, and the layer and the expert where it has any."""

    rule: TensorRule
    place: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that it becomes."""
        return self.rule.names_of(self.place)

    @property
    def part(self) -> tuple[int, ...]:
        """Key that is equal for the tensors of one layer, of what is used before all layers, and of
        what is used after them; sorts in that order."""
        if self.rule.key.startswith(LAYERS):
            return (1, self.place[0])
        return (0,) if self.rule.key.startswith(_FIRST) else (2,)

    def convert(self, whole: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
        """`whole`, of any dtype, under the names of transformers."""
        return zip(self.names, self.rule.to_hf(whole, shape), strict=True)


def jobs_in_order_of_use(shape: ModelShape) -> list[Job]:
    """Return all jobs of a model: embeddings, each layer in turn, final norm and output layer."""
    jobs = [Job(rule, place) for rule in rules_of(shape) for place in rule.places(shape)]
    return sorted(jobs, key=lambda job: job.part)


def write_model(
    output: Path,
    shape: ModelShape,
    dtype_of: Callable[[TensorRule], torch.dtype],
    tensors: Iterable[tuple[str, Tensor]],
    max_file_nbytes: int,
) -> None:
    """Write a directory of Hugging Face, whole or not at all. tensors: all, in order of use;
    dtype_of: each rule's in it; otherwise as write_folder."""
    infos = {
        name: TensorInfo(size, dtype_of(job.rule))
        for job in jobs_in_order_of_use(shape)
        for name, size in zip(job.names, job.rule.hf_sizes(shape), strict=True)
    }
    with complete_or_absent(output) as folder:
        write_config(shape, folder, dtype_of(rules_of(shape)[0]))
        write_folder(folder, infos, tensors, max_file_nbytes)


def match_keys(
    where: str, sizes: Mapping[str, Collection[int]], shape: ModelShape
) -> dict[str, str]:
    """The key that the model has for each rule's key.

    where: what has it, for messages.
    sizes: of all its tensors, by key, layers and experts stacked.
    Raises ConfigurationError, one line, unless they are exactly those of the rules, in their sizes.
    """
    found, missing = {}, []
    for rule in rules_of(shape):
        here = [key for key in (rule.key, OTHER_KEYS.get(rule.key, "")) if key in sizes]
        if not here:
            missing.append(rule.key)
            continue
        found[rule.key] = here[0]
        wanted = [*rule.stack(shape), *rule.megatron_size(shape)]
        if list(sizes[here[0]]) != wanted:
            raise ConfigurationError(
                f"{here[0]} has size {list(sizes[here[0]])}, but {wanted} by the arguments"
            )
    twins = {rule.twin for rule in rules_of(shape)}
    foreign = sorted(set(sizes) - set(found.values()) - twins)
    if missing or foreign:
        raise ConfigurationError(describe_difference(where, shape, missing, foreign))
    return found
