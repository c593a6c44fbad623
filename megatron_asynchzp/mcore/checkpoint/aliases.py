# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The second names of main parameters in a checkpoint's index.

Megatron's mixed-precision optimizer looks for `optimizer.state.fp32_param.<key>`, its distributed
optimizer for `optimizer.state.param.<key>`, also in fp32, where they are the model's parameters. An
index may give a stored tensor several names, so both find it and it is written once.
"""

from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_asynchzp.checkpoint_files.index import changed

_STATE = "optimizer.state."
_PLANS = "all_local_plans"
_MAIN_PARAM_NAMES = (f"{_STATE}fp32_param.", f"{_STATE}param.")


def complete_index(index: Metadata, keeps_plans: bool) -> Metadata:
    """Return the index with all names of every main parameter."""
    # keeps_plans adds each rank's plan, as long as the rest: a resumed run of the same structure
    # compares it with its own instead of planning its first save
    # (--ckpt-assume-constant-structure).
    if hasattr(index, _PLANS) and not keeps_plans:
        delattr(index, _PLANS)
    tensors, places = dict(index.state_dict_metadata), dict(index.storage_data)
    names: dict[str, list[str]] = {}
    for alias, source in _missing_names(index):
        tensors[alias] = tensors[source]
        names.setdefault(source, []).append(alias)
    if not names:
        return index
    for place, info in index.storage_data.items():
        places |= {replace(place, fqn=alias): info for alias in names.get(place.fqn, ())}
    return changed(index, state_dict_metadata=tensors, storage_data=places)


def _missing_names(index: Metadata) -> list[tuple[str, str]]:
    """Map each new name to the stored one; planned saves may have names without a tensor yet."""
    placed = {place.fqn for place in index.storage_data}
    entries = index.state_dict_metadata.items()
    stored = {
        key
        for key, entry in entries
        if isinstance(entry, TensorStorageMetadata) and (key in placed or not entry.chunks)
    }
    keys = {
        key.removeprefix(kind)
        for kind in (f"{_STATE}exp_avg.", _MAIN_PARAM_NAMES[0])
        for key in stored
        if key.startswith(kind)
    }
    return [
        (name + key, source)
        for key in keys
        for source in [next((s for s in (_MAIN_PARAM_NAMES[0] + key, key) if s in stored), None)]
        for name in _MAIN_PARAM_NAMES
        if source is not None and name + key not in stored
    ]
