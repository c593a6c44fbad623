# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what docs/results/compare.md is made from: which contenders run on which network, how often,
in about fifteen minutes on two quiet cores.
"""

from dataclasses import dataclass

from scripts.testbed.contenders.side_by_side import Contender

WARM_UP, STEPS = 2, 5


@dataclass(frozen=True)
class Part:
    """One network. twice, once: names of contenders, by how many repetitions they have."""

    profile: str
    twice: tuple[str, ...]
    once: tuple[str, ...] = ()

    def turns(self, contenders: list[Contender]) -> list[list[Contender]]:
        """Who runs in each repetition, in the order of `contenders`."""
        by_name = {one.name: one for one in contenders}
        absent = {*self.twice, *self.once} - set(by_name)
        assert not absent, absent
        first = [one for one in contenders if one.name in {*self.twice, *self.once}]
        return [first, [one for one in contenders if one.name in self.twice]]


_DEFAULT = "AsyncHZP threaded (2,2,4)"
# On every network: ours, stock's best and FSDP2's HSDP in both settings. DDP is the reference of
# the losses.
_ALWAYS = (_DEFAULT, "distributed optimizer", "FSDP2 HSDP", "FSDP2 HSDP, params kept")
PUBLISHED = (
    Part(
        "slow-between-nodes",
        (*_ALWAYS, "AsyncHZP threaded (1,2,4)", "DDP", "PP 2, interleaved"),
        (
            "Megatron-FSDP HSDP",
            "AsyncHZP threaded (2,2,2)",
            "AsyncHZP threaded (4,4,4)",
            "AsyncHZP threaded (1,1,4)",
            "AsyncHZP main-thread (2,2,4)",
            "AsyncHZP inline (2,2,4)",
            "TP 2",
            "PP 2",
            "TP 2 x PP 2",
            "Megatron-FSDP ZeRO-3",
            "FSDP2 ZeRO-3",
            "FSDP2 ZeRO-2",
            "DeepSpeed ZeRO-3",
            "DeepSpeed ZeRO-3 hpZ",
        ),
    ),
    Part(
        "slower-between-nodes",
        _ALWAYS,
        ("DDP", "PP 2, interleaved", "AsyncHZP threaded (1,2,4)", "Megatron-FSDP HSDP"),
    ),
    Part("fast", _ALWAYS, ("DDP", "AsyncHZP threaded (1,1,4)", "Megatron-FSDP HSDP")),
    Part(
        "unlimited",
        _ALWAYS,
        ("DDP", "AsyncHZP threaded (1,2,4)", "PP 2, interleaved", "Megatron-FSDP HSDP"),
    ),
)
