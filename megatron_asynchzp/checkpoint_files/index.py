# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns torch's index, `.metadata`, which lists the file of each part of each tensor.

It is a pickle without a checksum: unless a manifest has one, every entry is checked. The common
state (arguments, step, rerun state) lies in a file in megatron-core 0.18, later among the shards.
"""

import io
import math
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_asynchzp.checkpoint_files.errors import Damage
from megatron_asynchzp.checkpoint_files.parts import find_fault, is_state_of_layers

METADATA, CONFIG = ".metadata", "metadata.json"
COMMON_OBJECT = "common_state/shard_0_1"
"""The object in which Megatron keeps arguments and step."""

Items = dict[tuple[int, int], int]
"""(offset, length) of each archive in a file -> bytes of the tensor in it, 0 for an object."""

_MODULES = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "megatron.core.dist_checkpointing.",
    "nvidia_resiliency_ext.checkpointing.",
)
_PLAIN = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict", "defaultdict"),
    "builtins": ("set", "frozenset", "slice"),
    "pathlib": ("Path", "PosixPath"),
}


class _Unpickler(pickle._Unpickler):
    """Makes nothing but parts of an index.

    It is the slow unpickler, in Python: a damaged pickle can make C's fill a table of 64 GB.
    """

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 has it
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        symbol = super().find_class(module, name) if module.startswith(_MODULES) else None
        if not isinstance(symbol, type):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return symbol


def unpickle_index(data: bytes) -> Metadata:
    """Unpickle an index that may be damaged. Raises whatever damage leads to."""
    return _Unpickler(BytesIO(data)).load()


# The indices that this process has read, by folder; None while each read is one of a file.
_READ: ContextVar[dict[str, Metadata] | None] = ContextVar("asynchzp_read_indices", default=None)


@contextmanager
def index_read_once() -> Iterator[None]:
    """Read the index of a folder once within, however often the process asks for it."""
    token = _READ.set({} if _READ.get() is None else _READ.get())
    try:
        yield
    finally:
        _READ.reset(token)


def is_read_once() -> bool:
    return _READ.get() is not None


class IndexReader(FileSystemReader):
    """torch's reader of files, to which index_read_once applies."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        read, folder = _READ.get(), os.path.abspath(self.path)
        if read is None:
            return super().read_metadata(*args, **options)
        if folder not in read:
            read[folder] = super().read_metadata(*args, **options)
        return read[folder]


def changed(index: Metadata, **fields: Any) -> Metadata:
    """Copy with other `fields`, and with Megatron's additions to an index, which are no fields."""
    copy = replace(index, **fields)
    vars(copy).update({name: it for name, it in vars(index).items() if name not in vars(copy)})
    return copy


def pickle_index(index: Metadata) -> bytes:
    meta = index.storage_meta
    if meta is not None and isinstance(meta.checkpoint_id, PurePath):
        # Python 3.13 has another name for its class.
        meta = replace(meta, checkpoint_id=str(meta.checkpoint_id))
    file = BytesIO()
    _Pickler(file).dump(changed(index, storage_meta=meta))
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Leaves out a tensor's strides: torch 2.15 adds them, and earlier versions cannot read them.

    No reader needs them, since a shard is stored without gaps.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not TensorProperties:
            return NotImplemented
        make, its_class, state = obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL)[:3]
        return make, its_class, state[:_NUM_PROPERTIES]


_NUM_PROPERTIES = 5


def items_by_file(index: Metadata) -> dict[str, Items]:
    """Return what each file of a checkpoint has to hold.

    Raises Damage if the index contradicts itself or lacks a part of a tensor. Bytes that are no
    index may raise anything.
    """
    parts = dict(_parts(index))
    files: dict[str, Items] = {}
    owners: dict[tuple[str, int], str] = {}
    for entry, place in index.storage_data.items():
        part = entry.fqn, None if entry.offset is None else tuple(entry.offset)
        if part not in parts:
            raise Damage(f"{entry.fqn} lies in a file but has no shape")
        if Path(place.relative_path).name != place.relative_path:
            raise Damage("it names a file outside its directory")
        # A main parameter is stored once and has two names more, which end as its own does.
        owner = entry.fqn.rpartition("param.")[2]
        if owners.setdefault((place.relative_path, place.offset), owner) != owner:
            raise Damage(f"{entry.fqn} lies where another tensor does")
        items = files.setdefault(place.relative_path, {})
        span = place.offset, place.length
        items[span] = max(items.get(span, 0), parts.pop(part))
    if parts or not files:
        raise Damage(f"a part of {next(iter(parts), ('anything',))[0]} is in no file")
    return dict(sorted(files.items()))


def _parts(index: Metadata) -> Iterator[tuple[tuple, int]]:
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield (name, None), 0
            continue
        fault = find_fault(entry.size, entry.chunks, lacks_rows=is_state_of_layers(name))
        if fault is not None:
            raise Damage(f"the parts of {name} do not fit its shape: {fault}")
        seen: set[tuple[int, ...]] = set()
        for chunk in entry.chunks:
            offsets = tuple(chunk.offsets)
            if offsets in seen:
                raise Damage(f"{name} has two parts at one place")
            seen.add(offsets)
            yield (name, offsets), math.prod(chunk.sizes) * entry.properties.dtype.itemsize


COMMON = "common.pt"


def read_common_state(iteration_dir: Path | str) -> dict[str, Any]:
    """Read the common state from the file or the object that holds it.

    Classes of Megatron are read only if megatron.core has been imported. Raises what torch.load
    does, and FileNotFoundError if there is no such state.
    """
    file = Path(iteration_dir) / COMMON
    if file.is_file():
        return torch.load(file, map_location="cpu", weights_only=True)
    state: dict[str, Any] = {COMMON_OBJECT: io.BytesIO()}
    reader = IndexReader(iteration_dir)
    if COMMON_OBJECT not in reader.read_metadata().state_dict_metadata:
        raise FileNotFoundError(f"{iteration_dir} keeps no arguments: it has no {COMMON}")
    try:
        load(state, storage_reader=reader, planner=_OnlyKnown(), no_dist=True)
    except CheckpointException as error:  # wraps whatever happened
        raise error.failures[0][0] from None
    return state[COMMON_OBJECT][0]  # Megatron keeps an object as a list of one


class _OnlyKnown(DefaultLoadPlanner):
    """A planner that unpickles known classes alone; torch's own unpickles any."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=True
        )
