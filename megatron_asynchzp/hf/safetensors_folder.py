# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the weight files of a Hugging Face directory: which file holds a tensor, and how large files
get.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_asynchzp.hf.shape import ConversionError

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class TensorInfo(NamedTuple):
    size: torch.Size
    dtype: torch.dtype | None  # None: none that a model of ours can have


class FolderReader:
    """Tensors of one directory, read one at a time. A context manager: files stay open."""

    def __init__(self, folder: Path):
        from safetensors import safe_open

        if (folder / _INDEX).is_file():
            files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        elif (folder / _ONE_FILE).is_file():
            files = [_ONE_FILE]
        else:
            raise ConversionError(f"{folder} has neither {_ONE_FILE} nor {_INDEX}")
        for name in files:
            if not (folder / name).is_file():
                raise ConversionError(f"{folder} has no {name}, which its index names")
        self._opened = [safe_open(folder / name, framework="pt") for name in files]
        # keys(), for the opened file is no dictionary and cannot be iterated.
        self._file_of = {name: file for file in self._opened for name in file.keys()}  # noqa: SIM118

    def __enter__(self) -> "FolderReader":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._opened:
            file.__exit__(None, None, None)

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def info(self, name: str) -> TensorInfo:
        piece = self._file_of[name].get_slice(name)
        return TensorInfo(torch.Size(piece.get_shape()), _DTYPES.get(piece.get_dtype()))

    def read(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_folder(
    folder: Path, sizes: dict[str, int], tensors: Iterable[tuple[str, Tensor]], max_file_nbytes: int
) -> None:
    """Write `tensors`, which come in the order of `sizes` (bytes, by name), in files of at most
    max_file_nbytes where no single tensor is larger. One file's tensors are in memory at a time.
    The directory holds its config.json already.
    """
    from safetensors.torch import save_file

    groups: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if groups[-1] and filled + nbytes > max_file_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    flow = iter(tensors)
    weight_map = {}
    for index, group in enumerate(groups):
        numbered = f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        file = numbered if len(groups) > 1 else _ONE_FILE
        held = {}
        for expected in group:
            name, held[expected] = next(flow)
            assert name == expected, (name, expected)
            weight_map[expected] = file
        save_file(held, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # save_file keeps others out
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
