# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A whole step of the engine in one CUDA graph: the bits of the same steps without one, what the
host submits in a replay, and what is told of a rank that does not replay."""

import time
from contextlib import nullcontext
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.order_check import OrderMismatch
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.captured_step import CapturedStep
from megatron_asynchzp.engine.zero.plan import plan_units
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.contenders.adam import owned_params
from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceWorlds
from tests.device.programs import device_of_rank, new_toy
from tests.support.selection import slow_unless
from tests.support.toy_models import toy_batch, toy_loss

STEPS, WARM_UP = 6, 2


class Trained(NamedTuple):
    """losses: of training and, after every other step, of an evaluation; params: a checksum of each
    unit; submitted: tasks of each lane in the last step's micro-batches."""

    losses: list[float]
    params: list[int]
    submitted: dict[str, int]


class Trainer:
    """An engine around a toy model of two micro-batches a step, which may be captured."""

    def __init__(self, sizes: ShardSizes, limit_s: float = 60.0, keep_nbytes: int = 0):
        self.model = new_toy()
        topology = ShardTopology(dist.get_world_size(), dist.get_rank(), sizes)
        groups = ShardGroups.create(topology, dist.group.WORLD, timedelta(seconds=60))
        config = ScheduleConfig("main-thread", time_limit_s=limit_s, keep_params_nbytes=keep_nbytes)
        plans = plan_units(self.model, [*self.model.blocks])
        self.runtime = HZPRuntime(self.model, plans, {"dense": groups}, config, grad_scale=0.5)
        owned = [param for unit in self.runtime.units for param in owned_params(unit)]
        self.optimizer = torch.optim.AdamW(owned, lr=1e-2)
        self.batches = [self._batch(0, index) for index in range(2)]
        self.total = torch.zeros((), device=device_of_rank())
        self.step = CapturedStep([self.runtime], True, 2, lambda: None)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _batch(self, step: int, index: int) -> torch.Tensor:
        return toy_batch(step, index, dist.get_rank()).to(device_of_rank())

    def begin(self, number: int) -> None:
        self.runtime.zero_grads()
        for index, batch in enumerate(self.batches):
            batch.copy_(self._batch(number, index))

    def micro_batches(self) -> None:
        self.total.zero_()
        for index, batch in enumerate(self.batches):
            with self.runtime.no_sync() if index == 0 else nullcontext():
                loss = toy_loss(self.model, batch)
                loss.backward()
            self.total.add_(loss.detach())
        self.runtime.sync_grads()

    def replay(self) -> None:
        self.step.prepare()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph), self.step.capturing():
                self.micro_batches()
        self.graph.replay()
        self.step.note_replay()

    def end(self) -> float:
        self.optimizer.step()
        self.runtime.sync_params()
        return self.total.item()

    def evaluate(self, number: int) -> float:
        with torch.no_grad():
            return toy_loss(self.model, self._batch(number, 7)).item()


def trained(sizes: ShardSizes, is_captured: bool, keep_nbytes: int = 0) -> Trained:
    trainer = Trainer(sizes, keep_nbytes=keep_nbytes)
    runtime, losses, before = trainer.runtime, list[float](), {}
    for number in range(STEPS):
        trainer.begin(number)
        before = dict(runtime.driver.counts)
        trainer.replay() if is_captured and number >= WARM_UP else trainer.micro_batches()
        submitted = {lane: n - before[lane] for lane, n in runtime.driver.counts.items()}
        losses.append(trainer.end())
        if number % 2:
            losses.append(trainer.evaluate(number))
    runtime.settle()
    params = [int(u.main_param.storage.view(torch.int32).sum()) for u in runtime.units]
    trainer.graph = None
    runtime.close()
    return Trained(losses, params, submitted)


def under_laws(sizes: tuple[int, int, int], laws: list[Delays], keep_nbytes: int) -> list[Trained]:
    from scripts.testbed.device import inside

    found = [trained(ShardSizes(*sizes), False, keep_nbytes)]
    for law in laws:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        found.append(trained(ShardSizes(*sizes), True, keep_nbytes))
    return found


SEEDS = [Delays(law, seed) for law in LAWS if law != "none" for seed in range(10)]


@pytest.mark.parametrize(
    ("sizes", "laws", "keep_nbytes"),
    [
        slow_unless(True, (2, 2, 2), [Delays("uniform", 1)], 0, id="few"),
        # A shard of parameters is no view of the optimizer's, so it is rebuilt.
        slow_unless(True, (1, 2, 2), [Delays("slow-rank", 2)], 0, id="rebuilt shards"),
        slow_unless(False, (1, 1, 2), SEEDS[::5], 0, id="whole parameters"),
        slow_unless(False, (1, 2, 2), SEEDS[::5], 0, id="gradients in shards"),
        slow_unless(False, (2, 2, 2), SEEDS[::5], 10**6, id="kept parameters"),
        slow_unless(False, (2, 2, 2), SEEDS, 0, id="each law"),
    ],
)
def test_steps_in_one_graph_have_the_bits_of_those_without(
    worlds: DeviceWorlds, sizes, laws, keep_nbytes
):
    for eager, *captured in worlds.run(under_laws, 2, sizes, laws, keep_nbytes, timeout_s=550):
        assert len(set(eager.losses)) == STEPS + STEPS // 2 and eager.submitted["reduce"] >= 4
        for run in captured:
            assert run.losses == eager.losses and run.params == eager.params
            # The comparison stands behind the replay.
            assert run.submitted == {**dict.fromkeys(eager.submitted, 0), "order": 1}


# ---- what is told


def one_rank_is_late(limit_s: float) -> str:
    """In the fourth step rank 1 replays when the limit is over."""
    trainer = Trainer(ShardSizes(2, 2, 2), limit_s)
    driver = trainer.runtime.driver
    driver._on_failure = lambda failure, is_closed: None  # else the late rank's process ends
    driver.call_roll()
    for number in range(3):
        trainer.begin(number)
        trainer.replay() if number else trainer.micro_batches()
        trainer.end()
    trainer.begin(3)
    assert trainer.graph is not None
    trainer.step.prepare()
    if dist.get_rank() == 1:
        time.sleep(3 * limit_s)
        trainer.graph.replay()
    else:
        trainer.graph.replay()
        trainer.step.note_replay()
    deadline = time.monotonic() + 5 * limit_s
    while not driver.has_failed() and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(RuntimeError) as told:
        driver.raise_failure()
    return str(told.value)


def another_order() -> str:
    """In the third step rank 1 has submitted more than a replay."""
    trainer = Trainer(ShardSizes(2, 2, 2))
    for number in range(3):
        trainer.begin(number)
        if number == 2 and dist.get_rank() == 1:
            trainer.runtime.driver.submitted.add("gather of another step")
        trainer.replay() if number else trainer.micro_batches()
        trainer.end()
    with pytest.raises(OrderMismatch) as told:
        trainer.runtime.settle()
    trainer.graph = None
    with pytest.raises(OrderMismatch):
        trainer.runtime.close()
    return str(told.value)


def sleep_with_a_graph() -> str:
    trainer = Trainer(ShardSizes(2, 2, 2))
    for number in range(2):
        trainer.begin(number)
        trainer.replay() if number else trainer.micro_batches()
        trainer.end()
    try:
        trainer.runtime.check_between_steps("sleep()")
    except ConfigurationError as error:
        return str(error)
    finally:
        trainer.graph = None
        trainer.runtime.close()
    return "nothing"


def test_a_rank_that_does_not_replay_is_named_within_the_limit(worlds: DeviceWorlds):
    told, _ = worlds.run(one_rank_is_late, 2, 2.0, timeout_s=60)
    assert "of the graph over ranks 0, 1 in step 4 failed: not finished after 2 s" in told
    assert "rank 1" in told


def test_ranks_that_replay_something_else_are_named(worlds: DeviceWorlds):
    for told in worlds.run(another_order, 2, timeout_s=60):
        assert "step 3: " in told and "'gather of another step' on rank 1" in told


def test_states_of_a_graph_cannot_be_moved_to_the_host(worlds: DeviceWorlds):
    for told in worlds.run(sleep_with_a_graph, 2, timeout_s=60):
        assert told.startswith("sleep() does not work with CUDA graphs")
