# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Records by how much stock Megatron differs from stock Megatron, for each configuration whose
parity bounds follow from it (see [Note: bounds] in tests/support/parity.py):

    python -m tests.mcore.stock_noise      # replaces docs/results/records/stock_noise.jsonl

Stock DDP is the reference, as in the parity tests. The others add the same numbers in another
order: the distributed optimizer with its overlaps, DDP with smaller buckets, and DDP whose ranks
and micro-batches take the samples of a global batch in another order. Of each
configuration the worst relative differences of a loss and of a gradient norm are kept, over as many
steps as the slow tests take.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from unittest import mock

from tests.mcore.test_parity import ONE_RANK_MODELS, TWO_RANK_MODELS
from tests.support.megatron_runs import DISTRIBUTED_OPTIMIZER, RunRecord, gpt_args, run_pretrain
from tests.support.parity import NOISE_RECORD, Variant, worst_difference
from tests.support.ranks import run_ranks
from tests.support.tiny_gpt import LineDataset

COMMAND = "python -m tests.mcore.stock_noise"
STEPS = 20
SMALL_BUCKETS = ["--overlap-grad-reduce", "--ddp-bucket-size", "10000"]
NUM_SHUFFLES = 3


def run_in_other_orders(variant: Variant) -> list[RunRecord]:
    argv = variant.argv(STEPS)
    flags = [SMALL_BUCKETS] if "sgd" in variant.flags else [SMALL_BUCKETS, DISTRIBUTED_OPTIMIZER]
    runs = [run_pretrain([*argv, *more]) for more in flags]
    batch = int(argv[argv.index("--global-batch-size", len(gpt_args())) + 1])
    for seed in range(NUM_SHUFFLES):
        with mock.patch.object(LineDataset, "__getitem__", shuffled(batch, seed)):
            runs.append(run_pretrain(argv))
    return runs


def shuffled(batch: int, seed: int) -> Callable:
    """LineDataset.__getitem__ with the samples of every global batch in another order."""
    original = LineDataset.__getitem__
    places = random.Random(seed).sample(range(batch), batch)

    def get(dataset: LineDataset, index: int) -> dict:
        return original(dataset, index // batch * batch + places[index % batch])

    return get


def measure(variants: Sequence[Variant]) -> list[dict]:
    """One row per variant. For all ranks of a world."""
    rows = []
    for variant in variants:
        reference = run_pretrain(variant.argv(STEPS))
        others = run_in_other_orders(variant)
        losses = [worst_difference(other.losses, reference.losses) for other in others]
        norms = [worst_difference(other.grad_norms, reference.grad_norms) for other in others]
        worst = {"worst_loss": max(losses), "worst_grad_norm": max(norms)}
        rows.append({"configuration": variant.name, "steps": STEPS} | worst)
    return rows


def main() -> None:
    date = datetime.now(UTC).date().isoformat()
    one_rank = [variant for variant in ONE_RANK_MODELS if variant.is_noisy]
    two_ranks = [variant for variant in TWO_RANK_MODELS if variant.is_noisy]
    lines = []
    for ranks, variants in ((4, one_rank), (8, [*one_rank, *two_ranks])):
        for row in run_ranks(measure, ranks, variants, timeout_s=1800)[0]:
            lines.append(json.dumps({"command": COMMAND, "date": date, "ranks": ranks} | row))
            print(lines[-1], file=sys.stderr)
    NOISE_RECORD.parent.mkdir(parents=True, exist_ok=True)
    NOISE_RECORD.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
