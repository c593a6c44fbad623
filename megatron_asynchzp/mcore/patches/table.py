# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Every function that is replaced, in the order of the documentation: all patches of this room."""

from megatron_asynchzp.mcore.patches import (
    arguments,
    checkpoint,
    datasets,
    model,
    offloading,
    process,
    sub_samples,
    whole_tensors,
)
from megatron_asynchzp.mcore.patches.patch import Patch

_MODULES = (arguments, datasets, model, process, offloading, sub_samples, whole_tensors, checkpoint)
PATCHES = tuple(it for module in _MODULES for it in vars(module).values() if isinstance(it, Patch))
