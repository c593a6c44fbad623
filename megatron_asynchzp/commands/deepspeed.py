# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what DeepSpeed's JSON becomes: shard sizes, and flags of Megatron."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_asynchzp.errors import ConfigurationError

# P, G, O of each ZeRO stage.
_STAGES = {
    0: ("1", "1", "1"),
    1: ("1", "1", "world"),
    2: ("1", "world", "world"),
    3: ("world", "world", "world"),
}
_FLAGS = {
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "train_batch_size": "--global-batch-size",
    "gradient_clipping": "--clip-grad",
}
_REFUSED = ("offload_optimizer", "offload_param", "cpu_offload")
_LOST = (
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
)


def flags_of(config: Mapping[str, Any], file: str) -> list[str]:
    """To add to a Megatron command line. Raises ConfigurationError naming the file and the key."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in _STAGES:
        raise ConfigurationError(f"{file}: zero_optimization.stage: not one of 0, 1, 2 and 3")
    sizes = dict(zip(("param", "grad", "optim"), _STAGES[stage], strict=True))
    # ZeRO++ keeps parameters within a node, MiCS all three.
    for key, states in (("zero_hpz_partition_size", ("param",)), ("mics_shard_size", (*sizes,))):
        size = zero.get(key, 1)
        if not isinstance(size, int) or (size < 1 and size != -1):
            raise ConfigurationError(f"{file}: zero_optimization.{key}: not a number of ranks")
        if stage == 3 and size > 1:
            sizes |= dict.fromkeys(states, str(size))
    flags = ["--use-asynchzp"]
    for state, size in sizes.items():
        flags += [f"--asynchzp-{state}-shard-size", size]
    for dtype in ("bf16", "fp16"):
        part = config.get(dtype)
        flags += [f"--{dtype}"] if isinstance(part, dict) and part.get("enabled") is True else []
    for key, flag in _FLAGS.items():
        value = config.get(key)
        flags += [flag, str(value)] if isinstance(value, int | float) else []
    return flags


def migrate(file: str) -> int:
    """Print what becomes of the file; returns 1 where it has what is refused, else 0."""
    try:
        config = json.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{file}: not a JSON file: {error}") from error
    if not isinstance(config, dict) or not {"zero_optimization", *_FLAGS} & config.keys():
        raise ConfigurationError(f"{file}: not a configuration of DeepSpeed")
    flags = flags_of(config, file)
    zero = config.get("zero_optimization", {})
    asked = [key for key, value in zero.items() if value and value != {"device": "none"}]
    refused = [key for key in asked if key in _REFUSED]
    print(f"{file}: {'does not start' if refused else 'starts'} with --use-asynchzp")
    for key in refused:
        print(f"Refused: {key}: not supported; drop it, and shard over more ranks instead")
    for key in (key for key in asked if key.startswith(_LOST)):
        print(f"Switched off: {key}: nothing below 16 bits goes on the wire")
    print(f"Add to a Megatron command line: {' '.join(flags)}")
    return int(bool(refused))
