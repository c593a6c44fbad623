# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The engine on the emulated device: torch's own allocator, streams, autograd threads and NCCL
groups, kernels put off by every law of delay."""

import pytest
import torch

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from scripts.testbed.ranks import run_ranks
from tests.device.programs import Case, Seen, train_engine, train_engine_each, train_engine_under
from tests.support.selection import slow_unless

EACH_LAW = [Delays(law, seed) for seed, law in enumerate(LAWS)]
FEW = EACH_LAW[::2]
# Seeds choose the stream or the rank that is slow, and each delay.
MANY = [Delays(law, seed) for law in LAWS[1:] for seed in range(20)]

ALONE = [Case((1, 1, 1)), Case((1, 1, 1), "inline")]
PAIR = [Case((1, 2, 2)), Case((2, 2, 2), recomputes=True), Case((1, 1, 2), "inline", 1)]
IDLE = [Case((1, 2, 4), num_idle=2), Case((1, 1, 2), num_idle=3), Case((1, 1, 4), num_idle=1)]
FOUR = [Case((1, 2, 4)), Case((2, 2, 4), recomputes=True), Case((4, 4, 4), "inline", 1)]


@pytest.mark.parametrize(
    ("world_size", "cases", "laws"),
    [
        slow_unless(True, 2, PAIR[:1], FEW, id="2 ranks, few laws"),
        slow_unless(False, 2, PAIR, EACH_LAW, id="2 ranks, each law"),
        slow_unless(False, 1, ALONE, EACH_LAW, id="1 rank, each law"),
        slow_unless(False, 1, ALONE, MANY, id="1 rank, many seeds"),
        slow_unless(False, 2, PAIR, MANY, id="2 ranks, many seeds"),
    ],
)
def test_under_every_law_of_delay_the_engine_has_the_bits_of_its_run_on_gloo(
    worlds: DeviceWorlds, world_size: int, cases: list[Case], laws: list[Delays]
):
    expected = dict(zip(cases, run_ranks(train_engine_each, world_size, cases)[0]))
    ranks = worlds.run(train_engine_under, world_size, cases, laws, timeout_s=60 * len(laws))
    assert len(ranks[0]) == len(cases) * len(laws)
    for run in ranks[0]:
        assert run.seen == expected[run.case], (run.case, str(run.delays))
        assert run.waited == {}


@pytest.mark.parametrize(
    ("cases", "laws"),
    [
        slow_unless(False, FOUR, EACH_LAW, id="each law"),
        slow_unless(False, FOUR, MANY, id="many seeds"),
    ],
)
def test_on_4_ranks_no_delay_changes_a_bit(
    worlds: DeviceWorlds, cases: list[Case], laws: list[Delays]
):
    """gloo adds four addends in another order, so those digits are only close."""
    close = dict(zip(cases, run_ranks(train_engine_each, 4, cases)[0]))
    ranks = worlds.run(train_engine_under, 4, cases, [Delays(), *laws], timeout_s=60 * len(laws))
    first = {run.case: run.seen for run in ranks[0][: len(cases)]}
    for run in ranks[0]:
        assert run.seen == first[run.case], (run.case, str(run.delays))
        for ours, theirs in zip(run.seen, close[run.case]):
            assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("world_size", "cases"), [slow_unless(False, 2, PAIR), slow_unless(False, 4, FOUR)]
)
def test_with_one_hardware_queue_where_no_two_kernels_overlap_nothing_hangs(
    worlds: DeviceWorlds, world_size: int, cases: list[Case]
):
    laws = [Delays(), Delays("uniform", 1), Delays("on-demand")]
    one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ranks = worlds.run(train_engine_under, world_size, cases, laws, env=one_queue)
    first = {run.case: run.seen for run in ranks[0][: len(cases)]}
    assert [run for run in ranks[0] if run.seen != first[run.case]] == []


@pytest.mark.slow
@pytest.mark.parametrize("queues", ["1", "8"])
def test_ranks_without_a_micro_batch_launch_what_the_others_do(worlds: DeviceWorlds, queues: str):
    close = dict(zip(IDLE, run_ranks(train_engine_each, 4, IDLE)[0]))
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    ranks = worlds.run(train_engine_under, 4, IDLE, [Delays(), *EACH_LAW], env=env)
    first = {run.case: run.seen for run in ranks[0][: len(IDLE)]}
    for run in ranks[0]:
        assert run.seen == first[run.case], (run.case, str(run.delays))
        for ours, theirs in zip(run.seen, close[run.case]):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_same_seed_delays_the_same_kernels_as_long_and_another_does_not(worlds: DeviceWorlds):
    laws = [Delays("uniform", seed) for seed in (5, 5, 6)]
    for rank in worlds.run(train_engine_under, 2, PAIR[:1], laws):
        first, again, other = (run.digest for run in rank)
        assert first == again != other


class _AllocatesWhereItComputes:
    """torch, but for `stack`: its result is memory of the stream that computes, of which a lane's
    collective knows nothing (what the comparison of orders once did)."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def stack(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.default_stream()):
            out = tensors[0].new_empty(len(tensors), *tensors[0].shape)
        return torch.stack(tensors, out=out)


def train_with_memory_freed_early(case: Case) -> list[tuple[float, float]]:
    from megatron_asynchzp.engine.comm import order_check

    order_check.torch = _AllocatesWhereItComputes()  # pyright: ignore[reportAttributeAccessIssue]
    return train_engine(case)


def test_memory_that_a_task_frees_while_its_collective_is_under_way_is_found(worlds: DeviceWorlds):
    """Without a delay, where its bits are right."""
    with pytest.raises(DeviceFailure, match=r"(allocating|freeing) .*default\).*nothing orders"):
        worlds.run(train_with_memory_freed_early, 2, PAIR[0])


def train_with_activations_on_the_host(cases: list[Case], pins: bool) -> list[Seen]:
    with torch.autograd.graph.save_on_cpu(pin_memory=pins):
        return train_engine_each(cases)


@pytest.mark.slow
@pytest.mark.parametrize("pins", [False, True], ids=["pageable", "pinned"])
def test_activations_that_autograd_saves_on_the_host_change_no_bit(
    worlds: DeviceWorlds, pins: bool
):
    expected = run_ranks(train_engine_each, 2, PAIR)
    assert worlds.run(train_with_activations_on_the_host, 2, PAIR, pins) == expected
