# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Plans steps of fine-tuning on sub-samples of different lengths (--hybrid-context-parallel).

    python -m scripts.bench.sub_samples --out FILE

Megatron's scheduler routes them; the planner says what a step takes, beside samples that are packed
for as many context-parallel ranks as the longest sub-sample needs.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import Attention, Batch, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.sub_samples import RoutedStep
from scripts.report.records import append, markdown_table
from scripts.testbed.machine import machine_record

RANKS, PER_RANK, TOKENS = 32, 8192, 8 * 2**20
MODEL = Model(4096, 128256, (Layer(Attention(32, 8, 128), Mlp(14336, True)),) * 32, is_tied=False)
_H100 = load_cluster("h100").with_ranks(RANKS)
# Context parallelism passes keys and values from rank to rank: through one network card of a node.
CLUSTER = replace(_H100, between=replace(_H100.between, cards=1))
_ROUND = 128  # tokens, to which a length is rounded up


def _lengths(draw: Callable[[random.Random], float], first: Sequence[int] = ()) -> list[int]:
    chance, lengths = random.Random(1), list(first)
    while sum(lengths) < TOKENS:
        length = min(max(draw(chance), _ROUND), RANKS * PER_RANK)
        lengths.append(-(-int(length) // _ROUND) * _ROUND)
    return lengths


DISTRIBUTIONS = {
    "uniform, 1k to 16k": _lengths(lambda chance: chance.uniform(1024, 16384)),
    "one of 256k, the others 1k to 16k": _lengths(
        lambda chance: chance.uniform(1024, 16384), [RANKS * PER_RANK]
    ),
    "log-normal as in chats, median 2k": _lengths(lambda chance: chance.lognormvariate(7.6, 1.2)),
    "log-normal, median 16k": _lengths(lambda chance: chance.lognormvariate(9.7, 1.2)),
}


@cache
def micro_batch_s(sizes: ShardSizes, samples: int, tokens: int, ranks: int) -> float:
    """Seconds that one more micro-batch of `samples` equal sub-samples adds to a step."""

    def step_s(number: int) -> float:
        batch = Batch(samples, tokens, number)
        costing: Any = Costing(MODEL, Plan(sizes, Parallel(cp=ranks), batch), CLUSTER)
        return costing.simulate(number).step_s

    return step_s(3) - step_s(2)


def packed_s(sizes: ShardSizes, lengths: Sequence[int]) -> tuple[int, float]:
    """Ranks of context parallelism for the longest, and a step of samples packed for them."""
    ranks = 1
    while ranks * PER_RANK < max(lengths):
        ranks *= 2
    room, packs = ranks * PER_RANK, []
    for length in sorted(lengths, reverse=True):
        pack = next((pack for pack in packs if sum(pack) + length <= room), None)
        if pack is None:
            packs.append(pack := [])
        pack.append(length)
    # As many equal sub-samples in a pack as have its pairs of tokens.
    equal = [max(1, round(room**2 / sum(n * n for n in pack))) for pack in packs]
    times = sorted(micro_batch_s(sizes, n, room // n, ranks) for n in equal)
    turns = RANKS // ranks
    return ranks, sum(max(times[i : i + turns]) for i in range(0, len(times), turns))


def rows() -> list[list[str]]:
    routed = BalancedCPScheduler(PER_RANK, SimpleNamespace(size=lambda: RANKS))  # pyright: ignore[reportArgumentType]
    made = []
    for name, lengths in DISTRIBUTIONS.items():
        _, routes = routed.get_groups_and_subsamples(list(enumerate(lengths)), None)
        for sizes in (ShardSizes(1, 1, RANKS), ShardSizes(8, 8, RANKS)):

            def one_s(tokens: int, ranks: int, sizes: ShardSizes = sizes) -> float:
                return micro_batch_s(sizes, 1, max(tokens, _ROUND), ranks)

            step = RoutedStep(routes, lengths, max(sizes.param, sizes.grad), one_s)
            ranks, packed = packed_s(sizes, lengths)
            cells = [name, str(len(lengths)), f"({sizes.param}, {sizes.grad}, {sizes.optim})"]
            cells += [str(step.longest), f"{step.filler_share:.1%}", f"{step.step_s:.1f}"]
            made.append([*cells, f"{packed:.1f} ({ranks})", f"{packed / step.step_s:.2f}"])
    return made


HEAD = ["lengths", "sub-samples", "sizes", "longest list", "fillers", "step (s)"]
HEAD += ["packed (s), CP", "faster"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args(argv).out
    table = markdown_table(HEAD, rows()).rstrip()
    append(out, machine_record(), {"kind": "table", "markdown": table})


if __name__ == "__main__":
    main()
