# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How a rank's part of a tensor appears in a checkpoint of torch.distributed.checkpoint."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_asynchzp.engine.sharding.layout import Box, cut_into_boxes
from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.errors import ConfigurationError

_ASYNC_SAVE = inspect.unwrap(checkpoint.async_save).__code__  # pyright: ignore[reportPrivateImportUsage]
_ONLY_SAVED = (
    "a rank has only a part of this parameter, which torch.distributed.checkpoint can save and "
    "load, and its async_save with a thread and torch's own stager. Take whole values from "
    "sharded.full_params()"
)

_OWN_GROUP = (
    "async_save's thread and the next step would use the default process group at the same time, "
    "and their messages could be mixed up. Make a group once, "
    'group = dist.new_group(backend="gloo"), and call async_save(..., process_group=group)'
)


def _refuse_unless_staged() -> None:
    """Refuse any caller but async_save, in a process group of its own.

    [Note: staged] async_save stages each tensor: it makes an empty one like it on the CPU, and
    copies the attributes. Neither call says that async_save made it, or in which process group its
    thread will send, so both are read from its stack frame.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _ASYNC_SAVE:
        frame = frame.f_back
    if frame is None:
        raise ConfigurationError(_ONLY_SAVED)
    is_shared = frame.f_locals["process_group"] in (None, dist.group.WORLD)
    if is_shared and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigurationError(_OWN_GROUP)


class ShardedState(torch.Tensor):
    """A run of elements of a tensor, which a checkpoint saves and loads in place, in boxes.

    It has shape and dtype of the whole tensor and no elements of its own: torch.distributed.
    checkpoint asks for a tensor and calls the three methods with double underscores. It finds what
    other ranks have by the offsets of boxes, so any other sharding can load it.
    """

    values: torch.Tensor  # 1-D, the elements `held` of the row-major tensor
    held: Range
    is_written: bool = True  # whether this rank saves them

    @staticmethod
    def __new__(cls, shape: Sequence[int], held: Range, values: torch.Tensor) -> "ShardedState":
        state = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=values.dtype, device=values.device
        )
        state.held, state.values = held, values
        return state

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.new_empty.default and args[1] == list(args[0].shape):
            _refuse_unless_staged()
            whole: ShardedState = args[0]
            return cls(whole.shape, whole.held, whole.values[:0].to(kwargs["device"]))
        raise ConfigurationError(_ONLY_SAVED)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise ConfigurationError(_ONLY_SAVED)

    def __deepcopy__(self, _memo: Any) -> Any:
        raise ConfigurationError(_ONLY_SAVED)

    def untyped_storage(self) -> Any:
        raise ConfigurationError(_ONLY_SAVED)

    def data_ptr(self) -> int:
        """See [Note: staged]."""
        _refuse_unless_staged()
        return 0

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedState({tuple(self.shape)}, {self.held})"

    def _boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        for box in cut_into_boxes(tuple(self.shape), self.held):
            start = box.range.start - self.held.start
            yield box, self.values[start : start + box.range.numel].view(box.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if not self.is_written:
            return []
        properties = TensorProperties.create_from_tensor(self.values)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            for box, _ in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box, values in self._boxes():
            if torch.Size(box.offset) == index.offset:
                return values
        raise ValueError(f"{index.fqn}: this rank holds nothing at offset {index.offset}")


NOT_THERE = "not there yet"
"""A checkpoint's placeholder for a state that the optimizer does not have yet."""


class AbsentState(ShardedState):
    """A state that the optimizer does not have yet, saved as NOT_THERE.

    If a checkpoint has it, it is loaded into memory that is allocated then.
    """

    is_loaded: bool = False  # whether `values` are there now

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.is_loaded:  # the checkpoint has it
            self.values = self.values.new_zeros(self.held.numel)
            self.is_loaded = True
        return super().__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        return NOT_THERE if index.offset is None else super().__get_tensor_shard__(index)
