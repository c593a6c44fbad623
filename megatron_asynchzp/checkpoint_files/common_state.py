# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the reading of a checkpoint's state outside its shards: arguments, step, rerun state.

megatron-core 0.18 writes it to a file, later versions as an object among the shards.
"""

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_asynchzp.checkpoint_files.index import COMMON_OBJECT, IndexReader

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
