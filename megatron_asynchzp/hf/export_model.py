# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Converts a Megatron checkpoint to a Hugging Face directory."""

from collections.abc import Iterator
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_asynchzp.checkpoint_files.verification import VerifyLevel
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.mapping import TensorRule, jobs_in_order_of_use, match_keys, write_model
from megatron_asynchzp.hf.output_folder import Progress, check_unoccupied, no_progress
from megatron_asynchzp.hf.safetensors_folder import MAX_FILE_NBYTES
from megatron_asynchzp.hf.shape import ModelShape, read_arguments
from megatron_asynchzp.hf.torch_dist import TensorReader, find_checkpoint, read_arguments_of

_IN, _OUT = ".adapter.linear_in.weight", ".adapter.linear_out.weight"


class MergingReader:
    """Reads the weights of a checkpoint with their adapters merged, as TensorReader does.

    `checkpoint` and `base`, which has the tensors that `checkpoint` lacks
    (--asynchzp-save-trained-only), are folders of an iteration. `alpha` is the adapters' scale
    times their rank. Raises ConfigurationError for adapters that have no alpha or no weight, or do
    not fit their weight, and for an alpha without adapters.
    """

    def __init__(self, checkpoint: Path, base: Path | None = None, alpha: float | None = None):
        self._places = _places(TensorReader(checkpoint))
        if base is not None:
            rest = _places(TensorReader(base)).items()
            self._places = {k: v for k, v in rest if not k.startswith("optimizer.")} | self._places
        if alpha is not None and not isfinite(alpha):
            raise ConfigurationError(f"--adapter-alpha {alpha:g}: give a finite number")
        self._alpha = alpha
        adapted = {
            key.removesuffix(part)
            for key in self._places
            for part in (_IN, _OUT)
            if key.endswith(part) and not key.startswith("optimizer.")
        }
        self._adapted = {f"{linear}.weight" for linear in adapted}
        if adapted and alpha is None:
            raise ConfigurationError(
                f"{min(adapted)} has an adapter, whose scale is alpha / rank: add --adapter-alpha N"
            )
        if alpha is not None and not adapted:
            raise ConfigurationError(f"--adapter-alpha {alpha:g}: {checkpoint} has no adapters")
        for linear in sorted(adapted):
            self._check(linear)
        # Size and dtype of every tensor except adapters, by key.
        self.tensors = {
            key: self._entry(key) for key in self._places if not key.endswith((_IN, _OUT))
        }

    def _entry(self, key: str) -> TensorStorageMetadata:
        reader, stored = self._places[key]
        return reader.tensors[stored]

    def _check(self, linear: str) -> None:
        keys = f"{linear}.weight", f"{linear}{_OUT}", f"{linear}{_IN}"
        for key in keys:
            if key not in self._places:
                remedy = "; add --base DIR with a checkpoint that has it" if key == keys[0] else ""
                raise ConfigurationError(f"the checkpoint has an adapter, but no {key}{remedy}")
        whole, out, into = (list(self._entry(key).size) for key in keys)
        if [*out[:-1], *into[-1:]] != whole or into[:-2] != whole[:-2] or out[-1] != into[-2]:
            raise ConfigurationError(
                f"{linear} has size {whole}, which an adapter of {out} x {into} does not fit"
            )

    def read(self, key: str, place: tuple[int, ...] = ()) -> Tensor:
        """Read a weight in the dtype it was saved in, or in fp32 if it has an adapter."""
        weight = self._read(key, place)
        if key not in self._adapted or self._alpha is None:
            return weight
        linear = key.removesuffix(".weight")
        out, into = (self._read(f"{linear}{part}", place).float() for part in (_OUT, _IN))
        return weight.float() + self._alpha / len(into) * (out @ into)

    def _read(self, key: str, place: tuple[int, ...]) -> Tensor:
        reader, stored = self._places[key]
        return reader.read(stored, place)


def _places(reader: TensorReader) -> dict[str, tuple[TensorReader, str]]:
    return {key.replace(".to_wrap.", "."): (reader, key) for key in reader.tensors}


# Keys of a checkpoint that do not belong to the model.
_NOT_THE_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state", "asynchzp.")


def export_model(
    load: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    level: VerifyLevel = VerifyLevel.FULL,
    max_file_nbytes: int = MAX_FILE_NBYTES,
    progress: Progress = no_progress,
    base: Path | None = None,
    adapter_alpha: float | None = None,
) -> ModelShape:
    """Write the model of a Megatron checkpoint as a Hugging Face directory.

    Memory holds one tensor, in a few copies. Arguments are those of `asynchzp hf export`. Raises
    ConfigurationError, with nothing written, if the model has no family here or `output` is not
    empty.
    """
    check_unoccupied(output)
    checkpoint = find_checkpoint(load, step, level)
    args = read_arguments_of(checkpoint)
    shape = read_arguments(args, vocab_size)
    rest = None if base is None else find_checkpoint(base, level=level)
    alpha = getattr(args, "lora_alpha", None) if adapter_alpha is None else adapter_alpha
    reader = MergingReader(checkpoint, rest, alpha)
    keys = _match_keys(reader, shape)

    def target_dtype(rule: TensorRule) -> torch.dtype:
        return dtype or reader.tensors[keys[rule.key]].properties.dtype

    def tensors() -> Iterator[tuple[str, Tensor]]:
        jobs = jobs_in_order_of_use(shape)
        for job in progress(jobs, len(jobs)):
            whole = reader.read(keys[job.rule.key], job.place)
            yield from job.convert(whole.to(target_dtype(job.rule)), shape)

    write_model(output, shape, target_dtype, tensors(), max_file_nbytes)
    return shape


def _match_keys(reader: MergingReader, shape: ModelShape) -> dict[str, str]:
    sizes = {
        key: it.size
        for key, it in reader.tensors.items()
        if not key.startswith(_NOT_THE_MODEL) and "_extra_state" not in key
    }
    return match_keys("the checkpoint", sizes, shape)
