# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How long a run takes from the death of a node to its next step, and how many steps it makes
again, with local checkpoints and with those on shared storage:

    python -m scripts.bench.restart_times --kind local --out runs/restarts.jsonl

Two nodes of two ranks, agents of torchrun on this machine. A node is killed with all it has kept,
and started anew at once; --deaths times in one run.
"""

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from scripts.report.records import append
from scripts.testbed.agents import Nodes
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import flags_of

_SCRIPT = Path(__file__).parents[1] / "train" / "pretrain_gpt.py"
_EVERY = {"local": 2, "shared": 10}
_STEP = re.compile(r"\[(\d{4}-\d\d-\d\d [\d:.]+)\] iteration +(\d+)/")
# fmt: off
_FLAGS = flags_of({
    "num-layers": 4, "hidden-size": 256, "num-attention-heads": 4, "seq-length": 32,
    "max-position-embeddings": 32, "tokenizer-type": "NullTokenizer", "vocab-size": 1023,
    "micro-batch-size": 1, "global-batch-size": 4, "train-iters": 100000, "lr": 1e-3,
    "lr-decay-iters": 100, "eval-iters": 0, "eval-interval": 100000, "log-interval": 1,
    "num-workers": 0,
})
# fmt: on


class Step(NamedTuple):
    ended_at: float
    number: int


def steps_in(texts: list[str]) -> list[Step]:
    """Those that the logs name, in the order of their ends."""
    found = (match for text in texts for match in _STEP.finditer(text))
    return sorted(Step(datetime.fromisoformat(one[1]).timestamp(), int(one[2])) for one in found)


def measure(kind: str, deaths: int, folder: Path) -> Iterator[dict]:
    place = ["--load", str(folder / "runs"), "--save", str(folder / "runs")]
    words = [str(_SCRIPT), "--use-asynchzp", "--asynchzp-device", "cpu", "--mock-data"]
    words += [*_FLAGS, *place]
    if kind == "local":
        words += ["--save-interval", "100000", "--non-persistent-ckpt-type", "local"]
        words += ["--non-persistent-local-ckpt-dir", str(folder / "{node}"), "--replication"]
        words += ["--replication-jump", "2", "--non-persistent-save-interval", str(_EVERY[kind])]
    else:
        words += ["--save-interval", str(_EVERY[kind])]
    options = ["--nnodes", "2", "--max-restarts", str(deaths + 1), "--rdzv-conf"]
    options += ["is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5"]
    numbers = random.Random(1)
    with Nodes(folder, options, words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as nodes:
        names = ("a", "b")

        def texts() -> list[str]:
            return [nodes.log(name).read_text(errors="replace") for name in names]

        for name in names:
            nodes.start(name)
        died_at = 0.0
        for _ in range(deaths):
            enough = numbers.randint(11, 20)

            def has_gone_on(since: float = died_at, enough: int = enough) -> bool:
                return sum(one.ended_at > since for one in steps_in(texts())) >= enough

            nodes.await_that(has_gone_on)
            nodes.lose("b")
            died_at = time.time()
            shutil.rmtree(folder / "b", ignore_errors=True)
            last = steps_in(texts())[-1].number
            nodes.start("b")
            nodes.await_that(lambda since=died_at: steps_in(texts())[-1].ended_at > since)
            first = next(one for one in steps_in(texts()) if one.ended_at > died_at)
            line = {"kind": "restart", "checkpoints": kind, "interval": _EVERY[kind]}
            line["lost_steps"] = last - first.number + 1
            yield line | {"dead_s": round(first.ended_at - died_at, 1)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kind", choices=sorted(_EVERY), required=True)
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        append(args.out, machine_record())
        for line in measure(args.kind, args.deaths, Path(folder)):
            append(args.out, line)


if __name__ == "__main__":
    main(sys.argv[1:])
