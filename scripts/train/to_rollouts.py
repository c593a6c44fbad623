# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Streams weights from a training job to rollout workers: all of them once, then the changes.

Reinforcement learning needs that. The workers are processes of their own, in no process group of
the trainers and without anything of the engine but `apply_delta`.

    python -m scripts.train.to_rollouts                # 8 trainer ranks, 4 workers, on gloo

    trainer 0 | trainer 1 | trainer 2 | trainer 3 | ... | trainer 7       shard(...), one world
        |           |           |           |
    worker 0    worker 1    worker 2    worker 3                         a copy each, torch alone

Each worker has a trainer rank that receives the whole weights, unit by unit, and passes them on.
"""

import argparse
import hashlib
import os
import pickle
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

from megatron_asynchzp import ShardedModel, ShardSizes, WeightDelta, apply_delta, shard

VOCAB, HIDDEN, BLOCKS = 256, 64, 4
TIME_LIMIT = timedelta(seconds=120)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def new_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [Block() for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCAB))
    return model.to(torch.bfloat16)


# ---- between the jobs


class Bridge:
    """A way between the trainer ranks that receive and the workers, outside every process group.

    place: a receiving rank r has r, worker w has num_workers + w.
    """

    def __init__(self, folder: Path, place: int, num_workers: int):
        torch_dist: Any = dist
        store = torch_dist.FileStore(str(folder / "bridge"), 2 * num_workers)
        self._group = torch_dist.ProcessGroupGloo(store, place, 2 * num_workers, TIME_LIMIT)
        self._other = (place + num_workers) % (2 * num_workers)

    def send(self, message: object, *tensors: torch.Tensor) -> None:
        """Send a message that describes `tensors`, and then these."""
        header = pickle.dumps((message, [(one.shape, one.dtype) for one in tensors]))
        self._send(torch.tensor([len(header)]))
        self._send(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for one in tensors:
            self._send(one)

    def receive(self) -> tuple[Any, list[torch.Tensor]]:
        """The message, and the list of its tensors."""
        length = self._receive(torch.empty(1, dtype=torch.int64))
        header = self._receive(torch.empty(int(length), dtype=torch.uint8))
        message, descriptions = pickle.loads(header.numpy().tobytes())
        return message, [
            self._receive(torch.empty(shape, dtype=dtype)) for shape, dtype in descriptions
        ]

    def _send(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._group.send([tensor], self._other, 0).wait()

    def _receive(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self._group.recv([tensor], self._other, 0).wait()
        return tensor


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """Of all bits, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(
            name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


# ---- the two jobs


def train(rank: int, folder: Path, args: argparse.Namespace) -> None:
    dist.init_process_group(
        "gloo", f"file://{folder / 'world'}", rank=rank, world_size=args.trainers
    )
    model = new_model(seed=0)
    sizes = ShardSizes(args.param_shard, args.param_shard, args.trainers)
    sharded = shard(
        model, model, sizes, lambda params: torch.optim.AdamW(params, lr=args.learning_rate)
    )
    bridge = Bridge(folder, rank, args.workers) if rank < args.workers else None
    for turn in range(args.turns):
        nbytes = publish(sharded, bridge, turn, range(args.workers))
        # From here on the workers generate; the trainer learns from what they had before.
        whole = {name: value.clone() for name, value in sharded.full_params()}
        if bridge is not None:
            (digest, _) = bridge.receive()
            if digest != digest_of(whole):
                raise RuntimeError(f"turn {turn}: worker {rank} has other weights")
        dist.barrier()
        if rank == 0:
            dense = sum(value.nbytes for value in whole.values())
            print(
                f"turn {turn}: {args.workers} workers have the trainer's bits, by "
                f"{nbytes / 2**20:.3f} MiB each; all weights are {dense / 2**20:.3f} MiB",
                flush=True,
            )
        for step in range(args.steps):
            train_step(sharded, turn * args.steps + step)
    sharded.close()
    dist.destroy_process_group()


def publish(sharded: ShardedModel, bridge: Bridge | None, turn: int, receivers: range) -> int:
    """Bring the workers up to date. Returns the bytes of weights that this rank sent."""
    nbytes = 0
    if turn == 0:
        for name, value in sharded.stream_weights(receivers=receivers):
            if bridge is not None:
                bridge.send(("whole", name), value)
                nbytes += value.nbytes
    else:
        for delta in sharded.stream_changes("sent", receivers=receivers):
            if bridge is not None:
                parts = [delta.values] if delta.indices is None else [delta.values, delta.indices]
                bridge.send(("delta", (delta.name, delta.shape)), *parts)
                nbytes += delta.nbytes
    sharded.mark_weights("sent")
    if bridge is not None:
        bridge.send(("end", None))
    return nbytes


def train_step(sharded: ShardedModel, step: int) -> None:
    chance = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(VOCAB, (65,), generator=chance)
    sharded.zero_grad()
    logits = sharded.model(tokens[:-1]).float()
    torch.nn.functional.cross_entropy(logits, tokens[1:]).backward()
    sharded.clip_grad_norm_(1.0)
    sharded.step()


def roll_out(worker: int, folder: Path, args: argparse.Namespace) -> None:
    bridge = Bridge(folder, args.workers + worker, args.workers)
    model = new_model(seed=1 + worker)  # other values
    weights = model.state_dict()  # views of them
    for _ in range(args.turns):
        (kind, what), tensors = bridge.receive()
        while kind != "end":
            if kind == "whole":
                weights[what].copy_(tensors[0])
            else:
                indices = tensors[1] if len(tensors) > 1 else None
                name, shape = what
                apply_delta(weights, WeightDelta(name, shape, indices, tensors[0]))
            (kind, what), tensors = bridge.receive()
        with torch.no_grad():
            model(torch.arange(8))  # a rollout
        bridge.send(digest_of(weights))


def start(index: int, folder: Path, args: argparse.Namespace) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if index < args.trainers:
        train(index, folder, args)
    else:
        roll_out(index - args.trainers, folder, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--trainers", type=int, default=8, help="ranks")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--param-shard", type=int, default=4, help="ranks that share one copy")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="of training between two turns")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    args = parser.parse_args()
    if not 0 < args.workers <= args.trainers or min(args.turns, args.steps) < 1:
        parser.error("--workers is at least 1 and at most --trainers; --turns, --steps at least 1")
    with tempfile.TemporaryDirectory() as folder:
        num_processes = args.trainers + args.workers
        # Not "spawn", with which each imports torch again: nothing has used a device here.
        fork: Any = processes
        fork.start_processes(start, (Path(folder), args), num_processes, start_method="fork")


if __name__ == "__main__":
    main()
