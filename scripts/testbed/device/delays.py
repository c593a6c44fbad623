# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Says how kernels of the emulated device are put off, and counts them."""

from dataclasses import dataclass
from typing import NamedTuple

LAWS = ("none", "uniform", "slow-stream", "slow-rank", "on-demand")
"""none: at once; uniform: each kernel by up to longest_us; slow-stream: all of one stream by
longest_us; slow-rank: all of one rank; on-demand: nothing runs until a thread waits for it."""


@dataclass(frozen=True)
class Delays:
    law: str = "none"
    seed: int = 0
    longest_us: int = 1000

    def __str__(self) -> str:
        return f"law {self.law}, seed {self.seed}, {self.longest_us} us"


class Ran(NamedTuple):
    """Since the delays were set. digest: of every kernel's stream, number and delay."""

    num_kernels: int
    digest: int
