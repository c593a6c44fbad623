# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what `.metadata` says: which tensors and objects a checkpoint has, and in which file each
part of them lies. The file is a pickle without a checksum, so nothing in it is believed unseen.
"""

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron_asynchzp.checkpoint_files.archive import Item
from megatron_asynchzp.checkpoint_files.errors import Damage
from megatron_asynchzp.checkpoint_files.small_file import read_small

METADATA, CONFIG = ".metadata", "metadata.json"

_MODULES = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "megatron.core.dist_checkpointing.",
    "nvidia_resiliency_ext.checkpointing.",
)
_PLAIN = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "slice"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
}
# A damaged pickle can make C's unpickler allocate a table of 64 GB; Python's own keeps a dict. It
# is too slow for the largest files, which are left to their other checks.
_SLOW_UNPICKLER_NBYTES = 16 << 20


@dataclass(frozen=True)
class Tensor:
    """A whole tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Inventory:
    """The content of a checkpoint by name, and the items of each file in their order."""

    tensors: dict[str, Tensor]
    objects: frozenset[str]
    files: dict[str, tuple[Item, ...]]


def _find_class(module: str, name: str) -> Any:
    is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    if not is_dtype and (module, name) not in _PLAIN and not module.startswith(_MODULES):
        raise pickle.UnpicklingError(f"it names {module}.{name}")
    found = pickle.Unpickler(BytesIO()).find_class(module, name)
    if module.startswith(_MODULES) and not isinstance(found, type):
        raise pickle.UnpicklingError(f"it names {module}.{name}")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _find_class(module, name)


class _SlowUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _find_class(module, name)


def read_inventory(iteration_dir: Path, is_trusted: bool = False) -> Inventory:
    """What `.metadata` says. is_trusted: its checksum was right.

    Raises Damage where it cannot be read, contradicts itself or leaves part of a tensor out.
    """
    data = read_small(iteration_dir / METADATA)
    if data is None:
        raise Damage(f"{METADATA} is missing")
    is_fast = is_trusted or len(data) > _SLOW_UNPICKLER_NBYTES
    try:
        metadata = (_Unpickler if is_fast else _SlowUnpickler)(BytesIO(data)).load()
        tensors, objects, parts = _list_parts(metadata)
        files = _list_files(metadata.storage_data, parts)
    except Damage:
        raise
    except Exception as error:  # whatever a damaged pickle makes of it
        raise Damage(f"{METADATA} cannot be read ({type(error).__name__})") from None
    return Inventory(tensors, objects, files)


def _list_parts(metadata: Any) -> tuple[dict[str, Tensor], frozenset[str], dict[tuple, int | None]]:
    """Tensors, objects, and every part that storage must hold, with the bytes of its tensor."""
    tensors, objects, parts = {}, set(), {}
    for name, told in metadata.state_dict_metadata.items():
        if isinstance(told, BytesStorageMetadata):
            objects.add(str(name))
            parts[name, None] = None
        elif isinstance(told, TensorStorageMetadata):
            dtype = told.properties.dtype
            tensors[str(name)] = Tensor(tuple(told.size), dtype)
            for offsets, sizes in _check_cover(str(name), told):
                parts[name, offsets] = math.prod(sizes) * dtype.itemsize
        else:
            raise Damage(f"{METADATA}: {name} is neither a tensor nor an object")
    if not parts:
        raise Damage(f"{METADATA} names nothing")
    return tensors, frozenset(objects), parts


def _check_cover(name: str, told: TensorStorageMetadata) -> Iterator[tuple[tuple, tuple]]:
    size, num_elements, seen = tuple(told.size), 0, set()
    for chunk in told.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        is_inside = len(offsets) == len(sizes) == len(size) and all(
            offset >= 0 and extent >= 0 and offset + extent <= whole
            for offset, extent, whole in zip(offsets, sizes, size)
        )
        if not is_inside or offsets in seen:
            raise Damage(f"{METADATA}: the parts of {name} do not fit its shape")
        seen.add(offsets)
        num_elements += math.prod(sizes)
        yield offsets, sizes
    if num_elements != math.prod(size):
        raise Damage(f"{METADATA}: the parts of {name} do not cover it")


def _list_files(storage: Any, parts: dict[tuple, int | None]) -> dict[str, tuple[Item, ...]]:
    named: dict[str, set[Item]] = {}
    for index, place in storage.items():
        key = index.fqn, None if index.offset is None else tuple(index.offset)
        if key not in parts:
            raise Damage(f"{METADATA}: {index.fqn} lies in a file but has no shape")
        name, item = place.relative_path, Item(place.offset, place.length, parts.pop(key))
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise Damage(f"{METADATA} names a file outside its directory")
        if not (type(item.offset) is int and type(item.length) is int) or item.offset < 0:
            raise Damage(f"{METADATA}: {index.fqn} lies nowhere")
        named.setdefault(name, set()).add(item)  # an item may have several names
    if parts:
        raise Damage(f"{METADATA}: a part of {next(iter(parts))[0]} lies in no file")
    files = {
        name: sorted(items, key=lambda item: (item.offset, item.length))
        for name, items in named.items()
    }
    for name, items in files.items():
        for item, following in zip(items, items[1:]):
            if item.offset + item.length > following.offset:
                raise Damage(f"{METADATA}: items of {name} overlap")
        if any(item.length <= 0 for item in items):
            raise Damage(f"{METADATA}: an item of {name} is empty")
    return {name: tuple(items) for name, items in sorted(files.items())}
