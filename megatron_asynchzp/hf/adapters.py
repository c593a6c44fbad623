# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how low-rank adapters are merged into the weights that they stand beside, as a checkpoint is
read.

    decoder.layers.self_attention.linear_qkv.weight                    [layers, out, in]
    decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight  [layers, rank, in]
    decoder.layers.self_attention.linear_qkv.adapter.linear_out.weight [layers, out, rank]

So Megatron Bridge names them, and NeMo; a wrapper that leaves its `to_wrap` in the base's keys is
read as well.
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
    """A checkpoint whose weights are read with their adapters merged in; as TensorReader.

    base: the checkpoint that has what this one lacks (--asynchzp-save-trained-only); None: none.
    alpha: the adapters' scale is alpha / rank; None where that is not known.

    tensors: every tensor's size and dtype, by key, without adapters.

    Raises ConfigurationError, one line, for adapters without an alpha, without their weight or of
    other sizes than it, and for an alpha without adapters.
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
                where = "; --base DIR names the checkpoint that has it" if key == keys[0] else ""
                raise ConfigurationError(f"the checkpoint has an adapter, but no {key}{where}")
        whole, out, into = (list(self._entry(key).size) for key in keys)
        if [*out[:-1], *into[-1:]] != whole or into[:-2] != whole[:-2] or out[-1] != into[-2]:
            raise ConfigurationError(
                f"{linear} has size {whole}, which an adapter of {out} x {into} does not fit"
            )

    def read(self, key: str, place: tuple[int, ...] = ()) -> Tensor:
        """Read a weight as it was saved; with an adapter in fp32, for the caller to round once."""
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
    """Return by key without a wrapper who reads each tensor, and under which key."""
    return {key.replace(".to_wrap.", "."): (reader, key) for key in reader.tensors}


def alpha_of(args: Namespace, given: float | None) -> float | None:
    """Return the command line's alpha, else the one that the run's own arguments keep, if any."""
    return getattr(args, "lora_alpha", None) if given is None else given
