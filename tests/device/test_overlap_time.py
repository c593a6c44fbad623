# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's overlapped schedule by the device's clock: ours hides what stock hides, and more."""

import pytest

from scripts.bench.bench_device import FREED_LATE
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.profile import NetworkProfile
from tests.support.overlap_steps import SCHEDULES, STOCK, TIMES, Step, measure_each, model_flags


def hidden(step: Step) -> float:
    """The part of gathers and reductions beside which something is computed."""
    return 1 - step.exposed_others / step.others


@pytest.mark.slow
def test_as_much_of_the_all_to_alls_is_hidden_as_for_stock_and_more_of_the_gathers(
    te_worlds: DeviceWorlds,
):
    base = model_flags(ranks=2, experts_on=2, layers=2, micro_batches=4)
    ours = [*base, *size_flags((2, 2, 2))]
    lines = [[*base, *STOCK, *SCHEDULES["overlapped"]]]
    lines += [[*ours, *more] for more in SCHEDULES.values()]
    # One node, whose ranks share a link of 12.5 MB/s: the model is small.
    network = NetworkProfile("device", intra_gbit=0.1, ranks_per_node=2)
    for seen in te_worlds.run(
        measure_each, 2, lines, TIMES, network, env=FREED_LATE, timeout_s=590
    ):
        stock, plain, overlapped, late = seen
        assert overlapped.losses == stock.losses
        assert plain.exposed_all_to_all == pytest.approx(plain.all_to_all, rel=0.01)
        # Where a peer comes later because of its first gather, an all-to-all waits.
        assert overlapped.exposed_all_to_all <= 1.3 * stock.exposed_all_to_all
        assert late.exposed_all_to_all < overlapped.exposed_all_to_all < 0.4 * plain.all_to_all
        assert hidden(overlapped) > 0.7 > 2 * hidden(stock)
        assert late.step < overlapped.step < plain.step
