# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""AsyncHZP for Megatron-LM, and `shard` for models without it.

Importing this package loads neither torch nor megatron nor triton: each name below is loaded at its
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_asynchzp.checkpoint_files.parts import LoadPlanner, SavePlanner
    from megatron_asynchzp.engine.schedule import ScheduleConfig
    from megatron_asynchzp.engine.sharding.topology import ShardSizes
    from megatron_asynchzp.errors import ConfigurationError
    from megatron_asynchzp.hf.save_running import save_hf
    from megatron_asynchzp.hf.weight_stream import (
        forget_mark,
        mark_weights,
        stream_changes,
        stream_weights,
    )
    from megatron_asynchzp.library.sharded_model import ShardedModel, shard
    from megatron_asynchzp.mcore.door.building import building
    from megatron_asynchzp.mcore.door.install import install
    from megatron_asynchzp.mcore.door.whole import whole
    from megatron_asynchzp.mcore.flags.config import AsyncHZPConfig
    from megatron_asynchzp.weight_delta import WeightDelta, apply_delta

__version__ = "0.1.0"
# fmt: off
__all__ = ["AsyncHZPConfig", "ConfigurationError", "LoadPlanner", "SavePlanner", "ScheduleConfig",
           "ShardSizes", "ShardedModel", "WeightDelta", "apply_delta", "building", "forget_mark",
           "install", "mark_weights", "save_hf", "shard", "stream_changes", "stream_weights",
           "whole"]
# fmt: on

_HOMES = {
    "shard": "library.sharded_model",
    "ShardedModel": "library.sharded_model",
    "ShardSizes": "engine.sharding.topology",
    "AsyncHZPConfig": "mcore.flags.config",
    "ConfigurationError": "errors",
    "LoadPlanner": "checkpoint_files.parts",
    "SavePlanner": "checkpoint_files.parts",
    "ScheduleConfig": "engine.schedule",
    "WeightDelta": "weight_delta",
    "apply_delta": "weight_delta",
    "building": "mcore.door.building",
    "forget_mark": "hf.weight_stream",
    "install": "mcore.door.install",
    "mark_weights": "hf.weight_stream",
    "save_hf": "hf.save_running",
    "stream_changes": "hf.weight_stream",
    "stream_weights": "hf.weight_stream",
    "whole": "mcore.door.whole",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
