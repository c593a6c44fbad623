# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes single tensors of Megatron's torch_dist checkpoints, in one process."""

import functools
import io
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_asynchzp.checkpoint_files.choice import choose_checkpoint
from megatron_asynchzp.checkpoint_files.index import METADATA, pickle_index, read_common_state
from megatron_asynchzp.checkpoint_files.parts import create_read_items
from megatron_asynchzp.checkpoint_files.small_files import replace_file
from megatron_asynchzp.checkpoint_files.verification import VerifyLevel
from megatron_asynchzp.errors import ConfigurationError


def find_checkpoint(
    folder: Path, step: int | None = None, level: VerifyLevel = VerifyLevel.FULL
) -> Path:
    """Return the checkpoint of `step`, or the one that training would start from, below --load.

    Warn of newer checkpoints that are skipped. Raise ConfigurationError unless it is intact and in
    the format torch_dist.
    """
    choice = choose_checkpoint(folder, step, level=level)
    if choice is None:
        raise ConfigurationError(f"--load {folder} holds no checkpoint of Megatron")
    for line in choice.lines:
        print(f"megatron_asynchzp: {line}", file=sys.stderr, flush=True)
    return choice.folder


def read_arguments_of(checkpoint: Path) -> Namespace:
    import megatron.core  # noqa: F401  # lets torch read classes of Megatron

    try:
        args = read_common_state(checkpoint).get("args")
    except FileNotFoundError:
        args = None
    if args is None:
        raise ConfigurationError(f"{checkpoint} keeps no arguments of the model")
    return args


class TensorReader:
    """Reads the tensors of a checkpoint one at a time."""

    def __init__(self, checkpoint: Path):
        self._reader = FileSystemReader(checkpoint)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @functools.cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        entries = self._metadata.state_dict_metadata
        return {key: it for key, it in entries.items() if isinstance(it, TensorStorageMetadata)}

    def read(self, key: str, place: tuple[int, ...] = ()) -> Tensor:
        """Read `tensor[place]` of the tensor `key`, in the dtype it was saved in.

        Reads only the pieces that overlap with it.
        """
        stored = self.tensors[key]
        size, offsets = list(stored.size), [0] * len(stored.size)
        size[: len(place)], offsets[: len(place)] = [1] * len(place), place
        target = torch.empty(size, dtype=stored.properties.dtype)
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(size))
        try:
            items = create_read_items(key, stored, [chunk])
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise ConfigurationError(f"the checkpoint holds only a part of {key}")
        self._reader.read_data(LoadPlan(items), _IntoTensor(target)).wait()
        return target.view(stored.size[len(place) :])


class _IntoTensor(DefaultLoadPlanner):
    def __init__(self, target: Tensor):
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        piece = self._target
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (start, length) in enumerate(ranges):
            piece = piece.narrow(dim, start, length)
        return piece

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor of a new checkpoint, or a stack of tensors."""

    key: str
    size: torch.Size  # of each tensor of the stack
    dtype: torch.dtype
    stack: tuple[int, ...]  # sizes of the leading dimensions of the stack, () without one
    make: Callable[[tuple[int, ...]], Tensor]  # called once for each place of the stack

    def write_items(self) -> Iterator[tuple[WriteItem, Callable[[], Tensor]]]:
        properties = TensorProperties(dtype=self.dtype)
        whole = torch.Size([*self.stack, *self.size])
        size = torch.Size([*[1] * len(self.stack), *self.size])
        for place in product(*map(range, self.stack)):
            offsets = torch.Size([*place, *[0] * len(self.size)])
            data = TensorWriteData(ChunkStorageMetadata(offsets, size), properties, whole)
            index = MetadataIndex(self.key, offsets)
            item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
            yield item, lambda place=place: self.make(place).view(size)


def write_checkpoint(
    checkpoint: Path, tensors: list[TensorToWrite], objects: dict[str, Any]
) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    checkpoint.mkdir(parents=True)
    writer, planner = FileSystemWriter(checkpoint), _OneByOne(tensors, objects)
    try:
        save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # wraps any exception, an interrupt too
        raise error.failures[0][0] from None
    index = FileSystemReader(checkpoint).read_metadata()
    replace_file(checkpoint / METADATA, pickle_index(index))
    save_config(CheckpointingConfig("torch_dist", 1), str(checkpoint))


class _OneByOne(DefaultSavePlanner):
    """Makes every tensor when it is written, instead of holding a state dict of them."""

    def __init__(self, tensors: list[TensorToWrite], objects: dict[str, Any]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._makers: dict[tuple[str, torch.Size | None], Callable[[], Any]] = {}
        self._items: list[WriteItem] = []
        for tensor in tensors:
            for item, make in tensor.write_items():
                self._add(item, make)
        for key, value in objects.items():
            saved = _pickled(value)
            data = BytesIOWriteData(nbytes=len(saved))
            item = WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=data)
            self._add(item, lambda saved=saved: io.BytesIO(saved))

    def _add(self, item: WriteItem, make: Callable[[], Any]) -> None:
        self._items.append(item)
        self._makers[item.index.fqn, item.index.offset] = make

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._makers[write_item.index.fqn, write_item.index.offset]()


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save([value], buffer)  # Megatron keeps an object as a list of one
    return buffer.getvalue()
