# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Translates DeepSpeed's JSON into shard sizes and flags of Megatron."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_asynchzp.errors import ConfigurationError, raise_first

# P, G, O of each ZeRO stage.
_STAGES = {
    0: ("1", "1", "1"),
    1: ("1", "1", "world"),
    2: ("1", "world", "world"),
    3: ("world", "world", "world"),
}
_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
_PARTITIONS = ("zero_hpz_partition_size", "mics_shard_size")  # numbers of ranks
_REFUSED = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params")
_WEIGHTS = "weights are gathered in 16 bits, or as FP8 codes with --fp8-param-gather"
_LOST = {
    "zero_quantized_weights": _WEIGHTS,
    "zero_quantized_nontrainable_weights": _WEIGHTS,
    "zero_quantized_gradients": "gradients are reduced in fp32, or bf16 (--grad-reduce-in-bf16)",
}


def _leaves(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _is_given(value: Any) -> bool:
    return value is not None and value != "auto"  # a trainer of DeepSpeed's fills that in


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Name keys whose values DeepSpeed itself would refuse."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    if not _is_number(stage, int) or stage not in _STAGES:
        yield "zero_optimization.stage: not one of 0, 1, 2 and 3"
    for key in _PARTITIONS:
        size = zero.get(key, 1)
        if not _is_number(size, int) or (size < 1 and size != -1):
            yield f"zero_optimization.{key}: not a number of ranks"
    for key in (*_BATCH, "gradient_clipping"):
        value: Any = config.get(key)
        kinds = (int,) if key in _BATCH else (int, float)
        least = int(key in _BATCH)
        if _is_given(value) and not (_is_number(value, *kinds) and value >= least):
            yield f"{key}: not a number of at least {least}: {value}"


def translate(
    config: Mapping[str, Any], file: str, ranks: int | None = None
) -> tuple[list[str], list[str]]:
    """Return flags for a Megatron command line, and a line on each key without one.

    ranks: data-parallel ranks, None if unknown. A fault is refused with the file and the key.
    """
    raise_first(f"{file}: {fault}" for fault in _faults(config))
    left = dict(_leaves(config))  # what nothing below takes out is named

    def number(key: str) -> Any:
        return left.pop(key) if _is_given(left.get(key)) else None

    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    left.pop("zero_optimization.stage", left.pop("zero_optimization", None))
    sizes = dict(zip(("param", "grad", "optim"), _STAGES[stage], strict=True))
    # ZeRO++ keeps parameters within a node, MiCS all three.
    for key, states in zip(_PARTITIONS, (("param",), (*sizes,)), strict=True):
        size = zero.get(key, 1)
        if stage == 3 or size in (1, -1):
            left.pop(f"zero_optimization.{key}", None)
            sizes |= dict.fromkeys(states if size > 1 else (), str(size))
    flags = ["--use-asynchzp"]
    for state, size in sizes.items():
        flags += [f"--asynchzp-{state}-shard-size", size]
    dtypes = [dtype for dtype in ("bf16", "fp16") if left.get(f"{dtype}.enabled") is True]
    flags += [f"--{dtype}" for dtype in dtypes]
    lines = ["Refused: bf16 and fp16: enable one of them"] if len(dtypes) > 1 else []
    for key in ("bf16.enabled", "fp16.enabled"):
        if isinstance(left.get(key), bool):
            del left[key]

    micro, steps, batch = map(number, _BATCH)
    parts = f"{micro or 'micro-batch'} x {steps or 1} x the data-parallel ranks"
    divisor = (micro or 1) * (steps or 1) * (ranks or 1)
    if batch and ranks and (batch % divisor or (micro and steps and batch != divisor)):
        lines.append(f"Refused: train_batch_size: {batch} is not {parts}, of {ranks}")
    if not ranks and batch and not micro:
        lines.append(f"Give --micro-batch-size too, or --ranks here: {batch} = {parts}")
    elif not ranks and steps and steps > 1 and not batch:
        lines.append(f"Give --global-batch-size too, or --ranks here: it is {parts}")
    elif batch and not micro:
        micro = batch // divisor
    elif steps and micro and not batch:
        batch = divisor if ranks else None
    flags += ["--micro-batch-size", str(micro)] if micro else []
    flags += ["--global-batch-size", str(batch)] if batch else []
    clip = number("gradient_clipping")
    if config.get("gradient_clipping") != "auto":  # Megatron's default is 1.0, DeepSpeed's none
        flags += ["--clip-grad", str(clip or 0.0)]

    for key in (*_REFUSED, *_LOST):
        value = zero.get(key)
        is_off = not value or (isinstance(value, dict) and value.get("device", "none") == "none")
        if not is_off and key in _LOST:
            lines.append(f"Switched off: {key}: {_LOST[key]}")
        elif not is_off:
            lines.append(f"Refused: {key}: not supported; drop it, and shard over more ranks")
        for name in [
            key_name for key_name in left if f"{key_name}.".startswith(f"zero_optimization.{key}.")
        ]:
            del left[name]
    if left:
        named = ", ".join(f"{key} {json.dumps(value)}" for key, value in left.items())
        lines.append(f"Not translated: {named}")
    return flags, lines


def migrate(file: str, ranks: int | None = None) -> int:
    try:
        config = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        fault = f"not a JSON file: {error}"
        fault = error.strerror if isinstance(error, OSError) else fault
        raise ConfigurationError(f"{file}: {fault}") from error
    known = {"zero_optimization", "gradient_clipping", *_BATCH}
    if not isinstance(config, dict) or not known & config.keys():
        raise ConfigurationError(f"{file}: not a configuration of DeepSpeed")
    flags, lines = translate(config, file, ranks)
    is_refused = any(line.startswith("Refused") for line in lines)
    print(f"{file}: {'does not start' if is_refused else 'starts'} with --use-asynchzp")
    print("".join(f"{line}\n" for line in lines), end="")
    print(f"Add to a Megatron command line: {' '.join(flags)}")
    return int(is_refused)
