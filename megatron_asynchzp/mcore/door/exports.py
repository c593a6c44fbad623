# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where a framework reads `param.data` of a trained model to export it: within whole()."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron_asynchzp.mcore.door.whole import whole
from megatron_asynchzp.mcore.patches.patch import apply_patches, replaces


@replaces(
    "mcore_bridge.bridge.gpt_bridge.GPTBridge.export_weights",
    "self mg_models target_device only_master_rank peft_format adapter_name converter tqdm_desc "
    "disable_tqdm _is_saving skip_unsupported_export",
    why="ms-swift saves and sends weights in the form of Hugging Face from here",
    drop_when="the bridge asks the wrapper for whole parameters",
)
def export_weights(
    original: Callable, self: Any, mg_models: Any, *args: Any, **options: Any
) -> Iterator[Any]:
    with whole(mg_models):
        yield from original(self, mg_models, *args, **options)


def patch_exports() -> None:
    """Let the bridges that this process has imported read whole parameters."""
    if "mcore_bridge" in sys.modules:
        apply_patches([export_weights])
