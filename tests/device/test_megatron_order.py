# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""One order of all collectives of a Megatron run, Megatron's own and the engine's: no delay of a
rank, stream or operation changes it, and it closes no circle in one hardware queue."""

import pytest
import torch.distributed as dist

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import gpt_args, listening
from tests.device.test_megatron import LAYOUTS, pretrain_each
from tests.support.live_launches import ENV, Launch, LaunchRecord, meetings_of, stuck_in

STEPS_PER_LAW = 2  # param-syncs of a step end in the next one
NUM_WARM = 2 * STEPS_PER_LAW  # steps in which the engine still learns the order of use
NUM_SEEDS, NUM_SEEDS_IN_RUN = 250, 50


def launches_under(line: list[str], laws: list[Delays]) -> list[list[Launch]]:
    """What this rank launches in the steps under each law; before it, in those that warm up."""
    from scripts.testbed.device import inside

    record, taken, num_steps = LaunchRecord(), list[list[Launch]](), 0

    def begin_step() -> None:
        nonlocal num_steps
        index, is_first = divmod(num_steps - NUM_WARM, STEPS_PER_LAW)
        if is_first == 0 and index >= 0:
            taken.append(record.take())
            if index < len(laws):
                inside.set_delays(laws[index], dist.get_rank(), dist.get_world_size())
        num_steps += 1

    num_iterations = NUM_WARM + STEPS_PER_LAW * len(laws) + 1
    with listening(begin_step, lambda _: None):
        pretrain_each([[*line, "--train-iters", str(num_iterations)]], [Delays()])
    return taken


def without_routes(launches: list[Launch]) -> list[Launch]:
    """How many tokens an expert gets changes with what the router learns."""
    return [one._replace(sizes="") if "all_to_all" in one.operation else one for one in launches]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, NUM_SEEDS_IN_RUN))
@pytest.mark.parametrize("name", ["tensor", "context", "expert", "pipeline"])
def test_no_delay_changes_what_any_rank_launches_and_one_queue_a_rank_takes_it(
    worlds: DeviceWorlds, name: str, first: int
):
    """1,000 seeds in all."""
    layout, others = LAYOUTS[name], LAWS[1:]
    seeds = range(first, first + NUM_SEEDS_IN_RUN)
    laws = [Delays(others[seed % len(others)], seed) for seed in seeds]
    # What is sent early depends on which steps are clipped: none.
    line = gpt_args(*layout.flags, *size_flags(layout.sizes), "--clip-grad", "1e6")
    ranks = worlds.run(
        launches_under, layout.world_size, line, laws, timeout_s=1000, env=layout.env | ENV
    )
    for _, *taken in ranks:
        assert len(taken) == len(laws)
        for law, launches in zip(laws, taken):
            assert without_routes(launches) == without_routes(taken[0]), str(law)
        assert len({launch.group for launch in taken[0]}) > 3  # ours and Megatron's
    for orders in zip(*ranks):
        assert stuck_in([meetings_of(launches) for launches in orders]) == []
