# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the weight files of a Hugging Face directory: which file holds a tensor, and how large files
get.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_asynchzp.errors import ConfigurationError

MAX_FILE_NBYTES = 5 * 10**9
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class TensorInfo(NamedTuple):
    size: torch.Size
    dtype: torch.dtype | None  # None: none that a model of ours can have

    @property
    def nbytes(self) -> int:
        return self.size.numel() * (self.dtype.itemsize if self.dtype else 0)


class FolderReader:
    """Tensors of one directory, read one at a time."""

    def __init__(self, folder: Path):
        if (folder / _INDEX).is_file():
            files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
        elif (folder / _ONE_FILE).is_file():
            files = [_ONE_FILE]
        else:
            raise ConfigurationError(f"{folder} has neither {_ONE_FILE} nor {_INDEX}")
        self._file_of: dict[str, Path] = {}
        self._infos: dict[str, TensorInfo] = {}
        for name in files:
            if not (folder / name).is_file():
                raise ConfigurationError(f"{folder} has no {name}, which its index names")
            self._read_header(folder / name)

    def _read_header(self, file: Path) -> None:
        with _opened(file) as tensors:
            # keys(), for the opened file is no dictionary and cannot be iterated.
            for name in tensors.keys():  # noqa: SIM118
                piece = tensors.get_slice(name)
                dtype = _DTYPES.get(piece.get_dtype())
                self._infos[name] = TensorInfo(torch.Size(piece.get_shape()), dtype)
                self._file_of[name] = file

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str) -> Tensor:
        # The file is mapped into memory, and what was read of it stays there until it is closed.
        with _opened(self._file_of[name]) as tensors:
            return tensors.get_tensor(name)


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_folder(
    folder: Path,
    infos: Mapping[str, TensorInfo],
    tensors: Iterable[tuple[str, Tensor]],
    max_file_nbytes: int,
) -> None:
    """Write `tensors`, which come in the order of `infos`, in files of at most max_file_nbytes
    where no single tensor is larger. One tensor is in memory at a time.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if groups[-1] and filled + info.nbytes > max_file_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += info.nbytes
    flow = iter(tensors)
    weight_map = {}
    for index, group in enumerate(groups):
        numbered = f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        file = numbered if len(groups) > 1 else _ONE_FILE
        weight_map |= dict.fromkeys(group, file)
        _write_file(folder / file, {name: infos[name] for name in group}, flow)
    if len(groups) > 1:
        total = sum(info.nbytes for info in infos.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_file(
    file: Path, infos: Mapping[str, TensorInfo], flow: Iterator[tuple[str, Tensor]]
) -> None:
    """Write one file as safetensors lays it out: the length of the header (8 bytes, little-endian),
    the header (JSON), the elements. The library itself writes no file tensor by tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in infos.items():
        assert info.dtype is not None, name
        start, end = end, end + info.nbytes
        place = {
            "dtype": _DTYPE_NAMES[info.dtype],
            "shape": info.size,
            "data_offsets": [start, end],
        }
        header[name] = place
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the elements begin at a multiple of 8
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for expected, info in infos.items():
            name, tensor = next(flow)
            assert (name, tensor.shape, tensor.dtype) == (expected, *info), (name, expected)
            out.write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
