# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns groups of Megatron's flags that tests and benchmarks share. Imports nothing of either."""

from collections.abc import Mapping, Sequence
from typing import Any

# fmt: off
DISTRIBUTED_OPTIMIZER = [
    "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
]
MEGATRON_FSDP = [
    *DISTRIBUTED_OPTIMIZER, "--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor",
    "--data-parallel-sharding-strategy", "optim_grads_params",
]
# fmt: on


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """`--name value` for each."""
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def size_flags(sizes: Sequence[int]) -> list[str]:
    """AsyncHZP with these numbers of ranks that share parameters, gradients, optimizer states."""
    names = [f"asynchzp-{state}-shard-size" for state in ("param", "grad", "optim")]
    return ["--use-asynchzp", *flags_of(dict(zip(names, sizes, strict=True)))]
