# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the second names of main parameters in a checkpoint on disk. Must not know a model.

Megatron's optimizers look for main parameters under two names: `optimizer.state.fp32_param.<key>`
(its mixed-precision optimizer) and `optimizer.state.param.<key>` (its distributed optimizer, which
has them in fp32 runs too, where they are the model's parameters). A checkpoint's index may give
one stored tensor several names, so each can be found without being written twice.
"""

import os
import pickle
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_INDEX = ".metadata"
_STATE = "optimizer.state."
MAIN_PARAM_NAMES = ("fp32_param", "param")


def name_main_params(directory: str | Path) -> None:
    """Give every main parameter of the checkpoint in `directory` all its names.

    Replaces the index atomically; done twice it changes nothing. For one rank, when the checkpoint
    is written.
    """
    path = Path(directory) / _INDEX
    index: Metadata = pickle.loads(path.read_bytes())
    if added := _aliases(index):
        temporary = path.with_name(f"{_INDEX}.new")
        with open(temporary, "wb") as file:
            pickle.dump(_with_names(index, added), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def _aliases(index: Metadata) -> dict[str, str]:
    """New name -> name under which the tensor is stored."""
    entries = index.state_dict_metadata.items()
    stored = {key for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
    moments = {key.removeprefix(f"{_STATE}exp_avg.") for key in stored if ".exp_avg." in key}
    mains = {key.removeprefix(f"{_STATE}fp32_param.") for key in stored if ".fp32_param." in key}
    added = {}
    for key in moments | mains:
        source = next((s for s in (f"{_STATE}fp32_param.{key}", key) if s in stored), None)
        for name in MAIN_PARAM_NAMES:
            alias = f"{_STATE}{name}.{key}"
            if source is not None and alias not in stored:
                added[alias] = source
    return added


def _with_names(index: Metadata, added: dict[str, str]) -> Metadata:
    tensors = {alias: index.state_dict_metadata[source] for alias, source in added.items()}
    names: dict[str, list[str]] = {}
    for alias, source in added.items():
        names.setdefault(source, []).append(alias)
    places = {
        replace(place, fqn=alias): info
        for place, info in index.storage_data.items()
        for alias in names.get(place.fqn, ())
    }
    return replace(
        index,
        state_dict_metadata=index.state_dict_metadata | tensors,
        storage_data=index.storage_data | places,
    )
