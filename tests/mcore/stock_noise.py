# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Records by how much stock Megatron differs from stock Megatron, for each configuration whose
parity bounds follow from it (see [Note: bounds] in tests/support/parity.py):

    python -m scripts.report.measure_again --only stock_noise

Stock DDP is the reference, as in the parity tests. The others add the same numbers in another
order: the distributed optimizer with its overlaps, and DDP with smaller buckets. Of each
configuration the worst relative differences of a loss and of a gradient norm are kept, over as many
steps as the slow tests take.
"""

import argparse
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from scripts.report.records import append
from scripts.testbed.differences import worst_difference
from scripts.testbed.megatron_flags import DISTRIBUTED_OPTIMIZER
from scripts.testbed.megatron_runs import run_pretrain
from scripts.testbed.ranks import run_ranks
from tests.mcore.test_parity import ONE_RANK_MODELS, TWO_RANK_MODELS
from tests.support.parity import Variant

STEPS = 20
OTHER_ORDERS = (
    DISTRIBUTED_OPTIMIZER,  # which knows no SGD
    ["--overlap-grad-reduce", "--ddp-bucket-size", "10000"],
    ["--overlap-grad-reduce", "--ddp-bucket-size", "40000"],
)


def measure(variants: Sequence[Variant]) -> list[dict]:
    """One row per variant. For all ranks of a world."""
    rows = []
    for variant in variants:
        argv = variant.argv(STEPS)
        reference = run_pretrain(argv)
        orders = OTHER_ORDERS[1:] if "sgd" in variant.flags else OTHER_ORDERS
        others = [run_pretrain([*argv, *flags]) for flags in orders]
        losses = [worst_difference(other.losses, reference.losses) for other in others]
        norms = [worst_difference(other.grad_norms, reference.grad_norms) for other in others]
        worst = {"worst_loss": max(losses), "worst_grad_norm": max(norms)}
        if not all(map(isfinite, worst.values())):
            raise RuntimeError(f"{variant.name}: stock's runs differ by {worst}: no noise")
        rows.append({"configuration": variant.name, "steps": STEPS} | worst)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("--out", type=Path, required=True, help="file to append JSON lines to")
    args = parser.parse_args()
    one_rank = [variant for variant in ONE_RANK_MODELS if variant.is_noisy]
    two_ranks = [variant for variant in TWO_RANK_MODELS if variant.is_noisy]
    for ranks, variants in ((4, one_rank), (8, [*one_rank, *two_ranks])):
        for row in run_ranks(measure, ranks, variants, timeout_s=1800)[0]:
            append(args.out, {"kind": "noise", "ranks": ranks} | row)


if __name__ == "__main__":
    main()
