# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What trains on gloo trains on the fabric, to the same losses: DDP, FSDP2, HSDP, the engine."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron_asynchzp.engine.schedule import SCHEDULES, ScheduleConfig
from scripts.testbed.contenders.fsdp2 import SHARDINGS, shard_fully
from scripts.testbed.fabric.streams import host_waits, install_streams
from scripts.testbed.profile import NetworkProfile
from scripts.testbed.ranks import run_ranks
from tests.support import engine
from tests.support.fabric import replace_default_group
from tests.support.selection import slow_unless
from tests.support.toy_models import toy_batch, toy_loss

STEPS = 3
# Slow enough that a read before the arrival would be a wrong number.
SLOW = NetworkProfile("slow", inter_gbit=0.02, inter_latency_us=1000.0, ranks_per_node=2)


MODELS = {
    "ddp": lambda: DistributedDataParallel(engine.build_toy(), bucket_cap_mb=0.01),
    "fsdp2": lambda: fully_sharded("fsdp2"),
    "hsdp": lambda: fully_sharded("hsdp"),
}


def fully_sharded(name: str) -> torch.nn.Module:
    model = engine.build_toy()
    units = [[block] for block in model.blocks]
    shard_fully(model, units, SHARDINGS[name], (2, 2), num_last=0)
    return model


def losses_of(name: str) -> list[float]:
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro_batch in range(2):  # the second one accumulates sharded gradients
            loss = toy_loss(model, toy_batch(step, micro_batch, dist.get_rank()))
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def train_on_both() -> dict[str, tuple[list[float], list[float], int]]:
    on_gloo = {name: losses_of(name) for name in MODELS}
    replace_default_group(SLOW)
    output = {}
    with install_streams():
        for name in MODELS:
            before = host_waits()
            output[name] = on_gloo[name], losses_of(name), host_waits() - before
    return output


def test_ddp_fsdp2_and_hsdp_learn_what_they_learn_on_gloo():
    output = run_ranks(train_on_both, 4)[0]
    for name, (on_gloo, on_fabric, num_waits) in output.items():
        # Accumulating sharded gradients reads what a collective brings, in place.
        assert num_waits == 0 and on_fabric == pytest.approx(on_gloo, rel=1e-6), name


def train_engine(sizes: tuple[int, int, int], with_streams: bool) -> None:
    def run(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer = engine.EngineTrainer(
            engine.build_toy(depth=4), sizes, schedule=ScheduleConfig(kind, prefetch_depth=2)
        )
        losses = [trainer.step(step, 2) for step in range(STEPS)]
        params = trainer.full_params()
        trainer.runtime.close()
        return losses, params

    on_gloo = run("inline")[0]
    replace_default_group(SLOW)
    engine.shard_groups.cache_clear()  # groups of the default group that was
    installed = install_streams() if with_streams else None
    losses, params = run("inline")
    assert losses == pytest.approx(on_gloo, rel=1e-6)
    for kind in SCHEDULES:
        other_losses, other_params = run(kind)
        assert other_losses == losses, kind
        for name, param in params.items():
            assert torch.equal(other_params[name], param), (kind, name)
    if installed:
        installed.undo()


@pytest.mark.parametrize("with_streams", [False, slow_unless(False, True)])
def test_the_engines_schedules_are_bitwise_equal_on_the_fabric(with_streams):
    run_ranks(train_engine, 4, (2, 2, 4), with_streams)
