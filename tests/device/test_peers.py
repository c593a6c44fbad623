# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Peers on the emulated device beside the engine: Megatron-FSDP v1 and v2 of megatron-core 0.19.2
train bit for bit as DDP does on gloo. What was found in them is below, each with its reproduction.
"""

from importlib.metadata import version
from math import isfinite

import pytest

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.ranks import run_ranks
from tests.device import peers

LAW_OF_EACH = [Delays(law, seed) for seed, law in enumerate(LAWS)]
# v1 frees its buckets before their stream waits for what reads them (below), and orders the two
# before it allocates again.
LATE = {"ASYNCHZP_DEVICE_FREES": "late"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not version("megatron-core").startswith("0.19.2"),
        reason="says what megatron-core 0.19.2 does",
    ),
]


@pytest.fixture(scope="module")
def expected() -> dict[str, peers.Losses]:
    """DDP on gloo, by optimizer."""
    runs = [(peers.ddp, (name,)) for name in peers.NEW_OPTIMIZER]
    return dict(zip(peers.NEW_OPTIMIZER, run_ranks(peers.train_each, 2, runs)[0][0], strict=True))


def test_megatron_fsdp_v2_and_the_engine_have_the_bits_of_ddp_under_every_law(
    worlds: DeviceWorlds, expected: dict[str, peers.Losses]
):
    runs = [(run, (name,)) for run in (peers.megatron_fsdp_v2, peers.engine) for name in expected]
    for rank in worlds.run(peers.train_each, 2, runs, LAW_OF_EACH, timeout_s=400):
        for delays, seen in zip(LAW_OF_EACH, rank, strict=True):
            assert seen == [*expected.values()] * 2, str(delays)


def test_megatron_fsdp_v1_has_the_bits_of_ddp_with_each_strategy_and_under_every_law(
    worlds: DeviceWorlds, expected: dict[str, peers.Losses]
):
    runs = [(peers.megatron_fsdp, (strategy,)) for strategy in range(4)]
    for rank in worlds.run(peers.train_each, 2, runs, LAW_OF_EACH, env=LATE, timeout_s=400):
        for delays, seen in zip(LAW_OF_EACH, rank, strict=True):
            assert seen == [expected["sgd"]] * 4, str(delays)


# ---- found in Megatron-FSDP v1 and v2


def test_found_with_optimizer_states_alone_sharded_it_adds_to_gradients_that_are_reduced_in_part(
    worlds: DeviceWorlds, expected: dict[str, peers.Losses]
):
    """With strategy 1 and `sync_model_each_microbatch`, the default, each backward reduces within
    the buffer in which gradients are added up (`reduce_scatter_tensor` of a bucket into its own
    part). The next micro-batch is added to what that leaves: the mean where a rank owns the part,
    its own gradients elsewhere. So with two micro-batches the gradients are wrong, without a word;
    with `set_model_auto_sync` before each of them, and with strategies 0, 2 and 3, they are right.
    """
    runs = [(peers.megatron_fsdp, (strategy, "sgd", False)) for strategy in range(4)]
    [seen] = worlds.run(peers.train_each, 2, runs, env=LATE)[0]
    assert [losses == expected["sgd"] for losses in seen] == [True, False, True, True]
    assert all(isfinite(loss) for losses in seen for loss in losses)


def test_found_its_optimizer_takes_a_step_of_its_own(
    worlds: DeviceWorlds, expected: dict[str, peers.Losses]
):
    """`fully_shard_optimizer` makes the states with a step whose gradients are zero. AdamW counts
    it, which makes the correction of its averages and so the first steps smaller, and decays
    the weights. (NVIDIA/Megatron-LM issue 5974; mended after 0.19.2.)"""
    runs = [(peers.megatron_fsdp, (strategy, "adamw")) for strategy in range(4)]
    [seen] = worlds.run(peers.train_each, 2, runs, env=LATE)[0]
    first, *later = expected["adamw"]
    for losses in seen:
        assert losses[0] == first
        assert losses[1:] != later and all(map(isfinite, losses))


def test_found_it_frees_parameters_before_their_stream_waits_for_what_reads_them(
    worlds: DeviceWorlds,
):
    """Strategy 3 allocates parameters on the stream of its gathers and frees them after a forward,
    before that stream waits. Tensor.record_stream asks for the wait before. No gather overwrites
    what is still read, because the stream waits before each allocation."""
    run = peers.unordered, 2, peers.megatron_fsdp, 3
    [strict, _] = worlds.run(*run)
    assert strict and all(line.startswith("freeing ") for line in strict)
    assert worlds.run(*run, env=LATE) == [[], []]


def test_found_version_2_with_replicas_frees_gradients_that_another_stream_still_adds_up(
    worlds: DeviceWorlds,
):
    """HSDP: with the last micro-batch `main_grad` is reduced over the nodes into a new buffer. The
    old one is memory of the compute stream, which may be given out at once, while the addition
    and the reduction on `reduce_scatter_stream` have not run. The compute stream waits for them at
    the end of backward. One hardware queue keeps them in order; with many, losses are others."""
    found = worlds.run(peers.unordered, 4, peers.megatron_fsdp_v2_hybrid, env=LATE)
    assert any("allocating" in line and "aten::add_" in line for line in found[0])
    assert worlds.run(peers.unordered, 4, peers.engine, env=LATE) == [[]] * 4
