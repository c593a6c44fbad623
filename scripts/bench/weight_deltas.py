# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes of exact weight deltas beside those of all weights: a bf16 model of N(0, 0.02^2) that AdamW
trains on 4 ranks, of 1 and 10 steps at three learning rates, after some steps of warm-up. Each
delta is applied to a copy, which has to have the bits of the trained model then.

    python -m scripts.bench.weight_deltas --out runs/deltas.jsonl
    python -m scripts.report.add_record weight_deltas runs/deltas.jsonl
"""

import argparse
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardSizes, apply_delta, shard
from scripts.report.delta_table import delta_table
from scripts.report.records import append
from scripts.testbed.machine import machine_record
from scripts.testbed.ranks import run_ranks

RATES, STEPS = (1e-6, 3e-6, 1e-4), (1, 10)
RANKS, SIZES = 4, ShardSizes(2, 2, 4)
VOCAB, TOKENS = 1000, 256
WARM_UP = 20  # the first steps of AdamW change more than later ones


class Block(nn.Module):
    """Norm, two linears, residual."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def new_model(hidden: int, num_blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(hidden) for _ in range(num_blocks)]
    model = nn.Sequential(nn.Embedding(VOCAB, hidden), *blocks, nn.Linear(hidden, VOCAB))
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)
    return model.to(torch.bfloat16)


def measure(hidden: int, num_blocks: int) -> list[dict]:
    """A line for each case."""
    lines: list[dict] = []
    for rate, num_steps in product(RATES, STEPS):
        model = new_model(hidden, num_blocks)
        sharded = shard(
            model, model, SIZES, lambda params, lr=rate: torch.optim.AdamW(params, lr=lr)
        )
        copy: dict[str, torch.Tensor] = {}
        chance = torch.Generator().manual_seed(dist.get_rank())
        for step in range(WARM_UP + num_steps):
            if step == WARM_UP:
                copy = {name: value.clone() for name, value in sharded.stream_weights()}
                sharded.mark_weights("copy")
            tokens = torch.randint(VOCAB, (TOKENS + 1,), generator=chance)
            sharded.zero_grad()
            nn.functional.cross_entropy(model(tokens[:-1]).float(), tokens[1:]).backward()
            sharded.clip_grad_norm_(1.0)
            sharded.step()
        before = {name: value.clone() for name, value in copy.items()}
        delta_nbytes = 0
        for delta in sharded.stream_changes("copy"):
            apply_delta(copy, delta)
            delta_nbytes += delta.nbytes
        for name, value in sharded.full_params():
            if not torch.equal(_bits_of(value), _bits_of(copy[name])):
                raise RuntimeError(f"{name} differs after its delta was applied")
        changed = sum(
            int((_bits_of(copy[name]) != _bits_of(value)).sum()) for name, value in before.items()
        )
        line = {"kind": "delta", "lr": rate, "steps": num_steps, "changed": changed}
        line["numel"] = sum(value.numel() for value in copy.values())
        line["delta_nbytes"] = delta_nbytes
        line["dense_nbytes"] = sum(value.nbytes for value in copy.values())
        lines.append(line)
        sharded.close()
    return lines


def _bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.detach().view(torch.int16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args()
    if min(args.hidden, args.blocks) < 1:
        parser.error("--hidden and --blocks must be at least 1")
    env = {"OMP_NUM_THREADS": "1"}
    lines = run_ranks(measure, RANKS, args.hidden, args.blocks, timeout_s=900.0, env=env)[0]
    print(delta_table(lines))
    if args.out:
        append(args.out, machine_record(), *lines)


if __name__ == "__main__":
    main()
