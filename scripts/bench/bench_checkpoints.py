# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of saving and loading a checkpoint: stock Megatron's DDP and its distributed
optimizer in both of its forms beside AsyncHZP, 4 gloo ranks behind the CPU platform, all in turns.
JSON lines with --out.

    python -m scripts.bench.bench_checkpoints --repetitions 6 --out runs/checkpoints.jsonl
    python -m scripts.report checkpoints runs/checkpoints.jsonl
"""

import argparse
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from scripts.bench.checkpoint_turn import Turn, TurnResult
from scripts.report.records import append
from scripts.testbed.machine import machine, versions
from scripts.testbed.megatron_flags import flags_of, shape_flags, size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from scripts.testbed.memory import install_memory_count
from scripts.testbed.ranks import run_ranks

NUM_RANKS, SEQ_LENGTH = 4, 32
_DISTRIBUTED = ["--use-distributed-optimizer"]
CONTENDERS = {
    "stock DDP": [],
    "stock distributed optimizer": _DISTRIBUTED,
    "stock distributed optimizer, fully reshardable": [
        *_DISTRIBUTED,
        "--dist-ckpt-optim-fully-reshardable",
    ],
    "AsyncHZP 2,2,4": size_flags((2, 2, 4)),
    "AsyncHZP 2,2,4, structure": [*size_flags((2, 2, 4)), "--asynchzp-verify", "structure"],
    "AsyncHZP 4,4,4": size_flags((4, 4, 4)),
    "AsyncHZP 1,1,4": size_flags((1, 1, 4)),
}


def main() -> None:
    args = parse_args(sys.argv[1:])
    common = {"bench": "checkpoints", "ranks": NUM_RANKS} | machine()
    common |= versions("torch", "megatron-core")
    folder = Path(tempfile.mkdtemp(prefix="bench_checkpoints.", dir=args.directory))
    console = Console(stderr=True)
    try:
        for repetition in range(args.repetitions):
            console.print(f"repetition {repetition + 1} of {args.repetitions}")
            # A process set of its own for each, with all contenders: none inherits a heap that
            # the repetitions before it have grown.
            results = run_ranks(
                measure,
                NUM_RANKS,
                args,
                folder,
                repetition,
                timeout_s=args.time_limit,
                env={"OMP_NUM_THREADS": "1"},
            )[0]
            for name, result in results.items():
                record = common | {"contender": name, "repetition": repetition} | asdict(result)
                record |= {"model": _model(args), "file_system": _file_system(folder)}
                console.print(_line(name, result), highlight=False, soft_wrap=True)
                if args.out:
                    append(args.out, record)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--saves", type=int, default=3, help="per turn, the first one included")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds per repetition")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args(argv)
    for name in ("repetitions", "layers", "hidden", "vocab"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.saves < 2:
        parser.error("--saves must be at least 2: a first one and a later one")
    if args.directory is not None and not args.directory.is_dir():
        parser.error(f"--directory {args.directory}: there is no such directory")
    if unknown := [name for name in args.contenders if name not in CONTENDERS]:
        parser.error(f"--contenders {unknown[0]}: not one of {', '.join(CONTENDERS)}")
    return args


def in_turns(names: list[str], repetition: int) -> list[str]:
    """The contenders, each repetition beginning with another one: none is always first."""
    start = repetition % len(names)
    return names[start:] + names[:start]


def measure(args: argparse.Namespace, folder: Path, repetition: int) -> dict[str, TurnResult]:
    """On the ranks: a training step of each contender, its saves and its loads. Complete on 0."""
    count = install_memory_count()
    results = {}
    for name in in_turns(args.contenders, repetition):
        target = folder / f"{repetition}-{list(CONTENDERS).index(name)}"
        turn = Turn(target, args.saves, count)
        shape = shape_flags(args.layers, args.hidden, SEQ_LENGTH, heads=8)
        words = {"vocab-size": args.vocab - 1, "global-batch-size": NUM_RANKS}
        short = {"train-iters": 1, "lr-warmup-iters": 0}
        argv = gpt_args("--bf16", *shape, *flags_of(words | short), *CONTENDERS[name])
        results[name] = run_pretrain(argv, inspect=turn.measure).inspected
        if dist.get_rank() == 0:
            shutil.rmtree(target)
        dist.barrier()
    return {name: results[name] for name in args.contenders}


def _model(args: argparse.Namespace) -> dict:
    return {"layers": args.layers, "hidden": args.hidden, "vocab": args.vocab}


def _file_system(folder: Path) -> str:
    """The type of the file system that `folder` lies in."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(inside, key=lambda mount: len(mount[0]))[1]


def _line(name: str, result: TurnResult) -> str:
    common = [
        f"{act} {one.seconds:.2f} s +{one.resident_nbytes >> 20} MiB"
        for act, one in result.acts.items()
    ]
    return f"{name}: {', '.join(common)}"


if __name__ == "__main__":
    main()
