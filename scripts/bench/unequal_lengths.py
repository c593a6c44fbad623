# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on sequences of unequal lengths: padded to the longest, packed with equal numbers of
micro-batches on all ranks, and packed with as many as each group of ranks needs. On 2 emulated
nodes of 2 ranks, in turns; computing a token takes the same time everywhere.

    python -m scripts.bench.unequal_lengths --out runs/unequal.jsonl
    python -m scripts.report.add_record unequal_lengths runs/unequal.jsonl
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardedModel, ShardSizes, shard
from scripts.report.records import append
from scripts.report.unequal_table import unequal_table
from scripts.testbed.contenders.adam import new_adamw
from scripts.testbed.contenders.layer_delay import Delay
from scripts.testbed.cpu_usage import CpuUsage
from scripts.testbed.fabric.network import Network
from scripts.testbed.fabric.streams import install_streams
from scripts.testbed.machine import machine_record
from scripts.testbed.profile import named_profile
from scripts.testbed.ranks import Cluster

NODES, RANKS = 2, 2
HIDDEN, BLOCKS = 256, 6
SHORTEST, LONGEST = 16, 512
SECONDS_PER_TOKEN = 60e-6  # of a block's forward
PROFILE = "ethernet-1g"
WARM_UP = 2
WAYS = ("alone", "padded", "packed, equal", "packed, unequal")


class Block(nn.Module):
    """A linear with a residual; each token takes as long."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [number, HIDDEN]."""
        return tokens + Delay.apply(self.linear(tokens), SECONDS_PER_TOKEN * len(tokens))


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def lengths_of(step: int, rank: int, num_sequences: int) -> list[int]:
    """Of a rank's sequences in a step; most are short (log-uniform)."""
    chance = random.Random(1000 * step + rank)
    span = LONGEST / SHORTEST
    return [round(SHORTEST * span ** chance.random()) for _ in range(num_sequences)]


def packed(lengths: Sequence[int]) -> list[list[int]]:
    """Micro-batches of at most LONGEST tokens: each sequence goes into the first that has room,
    the longest sequences first."""
    batches: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        room = next((one for one in batches if sum(one) + length <= LONGEST), None)
        if room is None:
            batches.append([length])
        else:
            room.append(length)
    return batches


def padded(lengths: Sequence[int]) -> list[list[int]]:
    """A sequence a micro-batch, each as long as the longest may be."""
    return [[length] for length in lengths]


def plan_of(way: str, step: int, rank: int, num_sequences: int) -> tuple[list[int], list[int]]:
    """Of each micro-batch of a rank in a step: how many tokens it computes, and how many of them
    count."""
    pack = padded if way == "padded" else packed
    world = range(NODES * RANKS)
    batches = [pack(lengths_of(step, other, num_sequences)) for other in world]
    mates = range(rank // RANKS * RANKS, (rank // RANKS + 1) * RANKS)
    most = max(len(batches[other]) for other in (mates if way == "packed, unequal" else world))
    counted = [sum(batch) for batch in batches[rank]]
    counted += [0] * (most - len(counted))
    computed = [LONGEST] * most if way == "padded" else counted
    return computed, counted


def work_of(group: int, step: int, num_sequences: int) -> list[int]:
    """Tokens of each micro-batch of the ranks from `group` on, as many as its longest on them."""
    ranks = range(group, group + RANKS)
    plans = [plan_of("packed, unequal", step, one, num_sequences)[0] for one in ranks]
    return list(map(max, zip(*plans, strict=True)))


def train_step(model: nn.Module, plan: tuple[list[int], list[int]], sharded: ShardedModel | None):
    for index, (computed, counted) in enumerate(zip(*plan, strict=True)):
        if sharded is not None:
            sharded.set_is_last_micro_batch(index == len(plan[0]) - 1)
        tokens = torch.ones(computed, HIDDEN).requires_grad_()
        model(tokens)[:counted].square().sum().mul(1e-6).backward()


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, num_sequences: int):
    """What the busiest group computes, and a shard's optimizer, without communication."""
    groups = range(0, NODES * RANKS, RANKS)
    longest = max((work_of(group, step, num_sequences) for group in groups), key=sum)
    train_step(model, (longest, longest), None)
    optimizer.step()


def measure(_: Network, args: argparse.Namespace) -> list[dict]:
    """A line for each way: seconds of each repetition, of the slowest rank."""
    install_streams()
    rank = dist.get_rank()
    model = new_model()
    sizes = ShardSizes(RANKS, RANKS, NODES * RANKS)
    sharded = shard(model, model, sizes, lambda params: new_adamw(p for _, p in params))
    plain = new_model()
    part = nn.Parameter(
        torch.zeros(sum(p.numel() for p in plain.parameters()) // dist.get_world_size())
    )
    part.grad = torch.zeros_like(part)
    optimizer = new_adamw([part])

    def run(way: str, steps: range) -> None:
        for step in steps:
            if way == "alone":
                alone(plain, optimizer, step, args.sequences)
                continue
            sharded.zero_grad()
            train_step(model, plan_of(way, step, rank, args.sequences), sharded)
            sharded.clip_grad_norm_(1e9)
            sharded.step()

    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    usage = CpuUsage()
    for _ in range(args.repetitions):
        for way in WAYS:
            run(way, range(WARM_UP))
            dist.barrier()
            begin_s = time.perf_counter()
            run(way, range(args.steps))
            seconds[way].append(time.perf_counter() - begin_s)
            sharded.runtime.settle()
    sharded.close()
    foreign = usage.foreign_share()
    steps, world = range(args.steps), range(NODES * RANKS)
    tokens = sum(sum(lengths_of(step, one, args.sequences)) for step in steps for one in world)
    lines = []
    for way in WAYS:
        taken = torch.tensor(seconds[way], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)  # pyright: ignore[reportUnknownMemberType]
        line = {"kind": "way", "way": way, "seconds": taken.tolist(), "steps": args.steps}
        lines.append(line | {"tokens": tokens, "foreign": round(foreign, 3)})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--sequences", type=int, default=8, help="of a rank in a step")
    parser.add_argument("--steps", type=int, default=4, help="of each repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args()
    if min(args.sequences, args.steps, args.repetitions) < 1:
        parser.error("--sequences, --steps and --repetitions must be at least 1")
    cluster = Cluster(NODES, RANKS, named_profile(PROFILE))
    lines = cluster.run(measure, args, timeout_s=900.0, env={"OMP_NUM_THREADS": "1"})[0]
    print(unequal_table(lines))
    if args.out:
        append(args.out, machine_record(), *lines)


if __name__ == "__main__":
    main()
