# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a shared checkpoint's index and files: real ones, as large as the model's are, without
the values.
"""

import math
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_asynchzp.checkpoint_files import manifest
from megatron_asynchzp.checkpoint_files.index import CONFIG, METADATA, pickle_index
from megatron_asynchzp.checkpoint_files.parts import check_plan, create_read_items
from megatron_asynchzp.checkpoint_files.verification import VerifyLevel, check_checkpoint
from megatron_asynchzp.mcore.checkpoint.save_ranks import joined_along
from megatron_asynchzp.planner.model import Batch, Model, Parallel, stage_units
from megatron_asynchzp.sharding.boxes import cut_into_boxes
from megatron_asynchzp.sharding.layout import FlatLayout
from megatron_asynchzp.sharding.topology import Range, ShardSizes, ShardTopology
from scripts.scale.costs import Cost, in_process, use

_STATES = ("", "fp32_param.", "exp_avg.", "exp_avg_sq.")
_FLOAT = TensorProperties(torch.float32)


class _Tensor(NamedTuple):
    """Of a unit; Megatron stacks those of all layers. parts: the boxes of each part, as (offset,
    shape), by the number of the part."""

    name: str
    shape: tuple[int, ...]
    layers: int
    parts: dict[int, list[tuple]]

    @property
    def num(self) -> int:
        return self.layers * sum(map(len, self.parts.values()))

    def chunks(self, part: int) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size((layer, *offset)), torch.Size((1, *box)))
            for layer in range(self.layers)
            for offset, box in self.parts.get(part, ())
        ]

    @property
    def size(self) -> torch.Size:
        return torch.Size((self.layers, *self.shape))


def measure_checkpoint(model: Model, ranks: int, sizes: ShardSizes, most: int) -> list[Cost]:
    """most: ranks that write a tensor at most."""
    axes = reversed(ShardTopology(ranks, 0, sizes).axes_between(1, sizes.optim))
    parts = sizes.optim // math.prod(joined_along([axis.size for axis in axes], most))
    written, held = _cut(model, parts), _cut(model, sizes.optim)
    num = len(_STATES) * sum(one.num for one in written)
    check_s, check_mb, index_s, index_mb, read_s, read_mb = in_process(_of_index, written)
    lookup_s = in_process(_of_lookup, written, held, sizes.optim // 2)
    files = min(ranks, parts * sum(unit.layers for unit in written if unit.name.endswith(".0")))
    manifest_s, judge_s = in_process(_of_files, files, ranks)
    return [
        Cost("save", "parts in the index", "", num),
        Cost("save", "plan checked: CPU of rank 0", "s", check_s),
        Cost("save", "plan checked: memory of rank 0", "MB", check_mb),
        Cost("save", "index: CPU of rank 0", "s", index_s),
        Cost("save", "index: its file", "MB", index_mb),
        Cost("save", "data files", "", files, False),
        Cost("save", "their manifest: CPU of rank 0", "s", manifest_s),
        Cost("load", "files judged: CPU of rank 0", "s", judge_s),
        Cost("load", "index read: CPU of a rank", "s", read_s),
        Cost("load", "index read: memory of a rank", "MB", read_mb),
        Cost("load", "own parts found: CPU of a rank", "s", lookup_s),
    ]


def _cut(model: Model, parts: int) -> list[_Tensor]:
    """The tensors of all units, whose states are cut into runs of equal length."""
    found: list[_Tensor] = []
    units = stage_units(model, Parallel(), Batch(1, 1), 0)
    for kind in dict.fromkeys(unit.kind for unit in units):
        alike = [unit for unit in units if unit.kind == kind]
        shapes = [tuple(map(int, s)) for s, n in alike[0].shapes.items() for _ in range(n)]
        named = [(f"{kind}.{number}", shape) for number, shape in enumerate(shapes)]
        layout = FlatLayout.build(named, parts)
        length = layout.padded_numel // parts
        for piece in layout.slices:
            boxes: dict[int, list[tuple]] = {}
            for part in range(piece.range.start // length, (piece.range.stop - 1) // length + 1):
                run = piece.range.intersect(Range(part * length, (part + 1) * length))
                cut = cut_into_boxes(piece.shape, run.within(piece.range))
                boxes[part] = [(box.offset, box.shape) for box in cut]
            found.append(_Tensor(piece.name, piece.shape, len(alike), boxes))
    return found


def _entries(tensors: list[_Tensor]) -> Iterator[tuple[str, _Tensor, TensorStorageMetadata]]:
    for state in _STATES:
        for one in tensors:
            chunks = [chunk for part in one.parts for chunk in one.chunks(part)]
            yield state + one.name, one, TensorStorageMetadata(_FLOAT, one.size, chunks)


def _of_index(tensors: list[_Tensor]) -> tuple[float, ...]:
    items: dict[int, list[WriteItem]] = defaultdict(list)
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, one, _ in _entries(tensors):
        for part in one.parts:
            for chunk in one.chunks(part):
                at, data = (
                    MetadataIndex(name, chunk.offsets),
                    TensorWriteData(chunk, _FLOAT, one.size),
                )
                items[part].append(WriteItem(at, WriteItemType.SHARD, tensor_data=data))
                places[at] = _StorageInfo(f"__{part}_0.distcp", len(places), 1)
    plans = [SavePlan(of_part) for of_part in items.values()]

    def check() -> Metadata:
        made, index = default_planner.create_default_global_save_plan(plans)
        check_plan(lambda *_: [], made, index)
        return index

    checked = use(check)
    checked.result.storage_data = places
    written = use(lambda: pickle_index(checked.result))
    read = use(lambda: pickle.loads(written.result))
    nbytes_mb = len(written.result) / 1e6
    return checked.cpu_s, checked.mb, written.cpu_s, nbytes_mb, read.cpu_s, read.mb


def _of_lookup(written: list[_Tensor], held: list[_Tensor], part: int) -> float:
    """Of the rank that holds `part` of each unit."""
    own = {one.name: one.chunks(part) for one in held}
    entries = list(_entries(written))

    def look() -> None:
        for name, one, entry in entries:
            create_read_items(name, entry, own[one.name])

    return use(look).cpu_s


def _of_files(files: int, ranks: int) -> tuple[float, float]:
    """Rank 0 writes the manifest; at a load it judges that, and its share of the files."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "iter_0000001")
        folder.mkdir()
        first = folder / "__0_0.distcp"
        torch.save(torch.zeros(16), first)
        for number in range(1, files):
            (folder / f"__{number}_0.distcp").hardlink_to(first)
        (folder / METADATA).write_bytes(b"index")
        (folder / CONFIG).write_text("{}")
        seal = manifest.seal_file(first)
        sealed = [seal._replace(name=f"__{number}_0.distcp") for number in range(files)]
        written = use(lambda: manifest.write_manifest(folder, sealed))
        peers: Any = SimpleNamespace(
            rank=0, size=ranks, gather=lambda mine: [mine], broadcast=lambda mine: mine
        )
        judged = use(lambda: check_checkpoint(folder, peers, VerifyLevel.STRUCTURE))
    return written.cpu_s, judged.cpu_s
