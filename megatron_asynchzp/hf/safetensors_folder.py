# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the weight files of a Hugging Face directory, one tensor at a time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_asynchzp.checkpoint_files.errors import one_line
from megatron_asynchzp.errors import ConfigurationError

MAX_FILE_NBYTES = 5 * 10**9
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTERS = "adapter_config.json"
_LFS = b"version https://git-lfs"
# Suffixes of weight files in formats that are not read here.
_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".safetensors", ".h5", ".msgpack")


class TensorInfo(NamedTuple):
    """Size and dtype of a tensor."""

    size: torch.Size
    dtype: torch.dtype | None  # None: a dtype that cannot be cast to fp32, bf16 or fp16

    @property
    def nbytes(self) -> int:
        return self.size.numel() * (self.dtype.itemsize if self.dtype else 0)


def read_json(path: Path) -> dict[str, Any]:
    _check_no_pointer(path)
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not JSON ({one_line(error)}); download or copy it again"
        ) from error
    if not isinstance(entries, dict):
        raise ConfigurationError(f"{path} is not a JSON object; download or copy it again")
    return entries


def _check_no_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise ConfigurationError(
                f"{path} is a git-lfs pointer, not the file; run git lfs pull in its directory"
            )


def _weight_files(folder: Path) -> list[str]:
    if (folder / _ADAPTERS).is_file():
        raise ConfigurationError(
            f"{folder} holds adapters ({_ADAPTERS}): merge them into their base with peft's "
            "merge_and_unload() and import what save_pretrained() writes of that"
        )
    config = folder / "config.json"
    named = read_json(config).get("transformers_weights") if config.is_file() else None
    first = named or next((n for n in (_ONE_FILE, _INDEX) if (folder / n).is_file()), None)
    if first is None:
        raise ConfigurationError(
            f"{folder} has neither {_ONE_FILE} nor {_INDEX}{_describe_weights(folder)}"
        )
    if not (folder / first).is_file():
        raise ConfigurationError(f"{folder} has no {first}, which its config.json names")
    if not first.endswith(".json"):
        return [first]
    files = read_json(folder / first).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ConfigurationError(
            f"{folder / first} has no weight_map from tensors to files; download or copy it again"
        )
    return sorted(set(files.values()))


def _describe_weights(folder: Path) -> str:
    for name in (_ONE_FILE, _INDEX):
        if (folder / name).is_symlink():
            return f": {name} is a link to a missing file; download it again"
    files = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in _WEIGHTS)
    if not files:
        return ", and so no weights; download them"
    return (
        f", but {files[0]}; import what save_pretrained() of transformers writes of it, or give it "
        "one of these names"
    )


class FolderReader:
    """Reads the tensors of a directory that transformers would read, one at a time.

    Raises ConfigurationError by name for a file that is missing or not whole.
    """

    def __init__(self, folder: Path):
        self._file_of: dict[str, Path] = {}
        self._infos: dict[str, TensorInfo] = {}
        for name in _weight_files(folder):
            if not (folder / name).is_file():
                raise ConfigurationError(
                    f"{folder} has no {name}, which its index names; download or copy it again"
                )
            _check_no_pointer(folder / name)
            self._read_header(folder / name)

    def _read_header(self, file: Path) -> None:
        with _opened(file) as tensors:
            # The opened file is no dictionary and cannot be iterated itself.
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

    def stored_dtype(self, name: str) -> str:
        with _opened(self._file_of[name]) as tensors:
            return tensors.get_slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        # The file is mapped, and pages that were read stay in memory until it is closed.
        with _opened(self._file_of[name]) as tensors:
            return tensors.get_tensor(name)


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"{file}, of {file.stat().st_size} bytes, is not a whole safetensors file "
            f"({one_line(error)}); download or copy it again"
        ) from error


_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()} | {"F64": torch.float64}


def write_folder(
    folder: Path,
    infos: Mapping[str, TensorInfo],
    tensors: Iterable[tuple[str, Tensor]],
    max_file_nbytes: int,
) -> None:
    """Write `tensors`, which come in the order of `infos`, with one in memory at a time.

    A file has at most max_file_nbytes, unless a single tensor is larger.
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
    """Write a safetensors file tensor by tensor, which the library cannot.

    A file holds the length of the header (8 bytes, little-endian), the header (JSON), the elements.
    """
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
