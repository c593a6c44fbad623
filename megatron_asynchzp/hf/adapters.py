# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Merges low-rank adapters into their weights while a checkpoint is read.

The keys are those of Megatron Bridge and NeMo; a key may also hold their wrapper's `to_wrap`.

    decoder.layers.self_attention.linear_qkv.weight                    [layers, out, in]
    decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight  [layers, rank, in]
    decoder.layers.self_attention.linear_qkv.adapter.linear_out.weight [layers, out, rank]
"""

from argparse import Namespace
from math import isfinite
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.torch_dist import TensorReader

_IN, _OUT = ".adapter.linear_in.weight", ".adapter.linear_out.weight"


class MergingReader:
    """Reads the weights of a checkpoint with their adapters merged, as TensorReader does.

    Args:
        checkpoint: The folder of an iteration.
        base: Another one with the tensors that `checkpoint` lacks (--asynchzp-save-trained-only).
        alpha: The scale of the adapters times their rank, if known.

    Raises:
        ConfigurationError: Adapters have no alpha or no weight, or do not fit their weight; or
            there is an alpha and no adapter.
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


def alpha_of(args: Namespace, given: float | None) -> float | None:
    return getattr(args, "lora_alpha", None) if given is None else given
