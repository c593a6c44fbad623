# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a step sends, as the network sees it: which collectives, how often and with how many
elements of which dtype. Gradients travel in fp32 whatever the model's dtype is; recomputation
sends nothing.
"""

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.schedule import ScheduleConfig
from scripts.testbed.differences import largest
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy, own_fragments
from tests.support.held_network import Submitted, replace_default_group
from tests.support.toy_models import toy_batch, toy_loss

WORLD_SIZE, MICRO_BATCHES = 4, 2
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Traffic:
    """Collectives of three steps of a toy model on this rank, and the sizes of its units."""

    def __init__(self, sizes: tuple, dtype: torch.dtype = torch.float32, **toy):
        network = replace_default_group()
        schedule = ScheduleConfig(checks_order=False)
        trainer = EngineTrainer(build_toy(dtype, **toy), sizes, schedule=schedule)
        network.take_journal()  # of the groups' own beginnings
        self.steps: list[list[Submitted]] = []
        for step in range(3):
            trainer.local_step(step, MICRO_BATCHES)
            trainer.runtime.settle()
            self.steps.append(network.take_journal())
        self.numels = [unit.layout.padded_numel for unit in trainer.runtime.units]
        trainer.runtime.close()

    def carried(self, purpose: str, step: int = 2) -> Counter:
        """Kind and cargo of what went over the communicators for "gather" or "reduce"."""
        desc = f"ASYNCHZP_{purpose.upper()}"
        mine = [one for one in self.steps[step] if one.group.split()[0] == desc]
        return Counter((one.kind, one.carried) for one in mine)


def lower_edges(sizes: tuple, inner: int, outer: int) -> list[int]:
    """Shard sizes at which the axes from `inner` to `outer` begin: one collective for each."""
    edges = sorted({1, *sizes, WORLD_SIZE})
    return [low for low, high in pairwise(edges) if inner <= low and high <= outer]


def compare_traffic(sizes: tuple, dtype: torch.dtype, **toy) -> None:
    (_, grad, optim), name = sizes, DTYPE_NAMES[dtype]
    traffic = Traffic(sizes, dtype, **toy)
    gathers, reductions = set(), Counter()
    for numel in traffic.numels:
        for edge in lower_edges(sizes, 1, optim):  # parameters, and their shards once per step
            gathers.add(("all_gather", f"{numel // edge} x {name}"))
        for edge in lower_edges(sizes, 1, grad):
            reductions["reduce_scatter", f"SUM {numel // edge} x float32"] += MICRO_BATCHES
        for edge in lower_edges(sizes, grad, optim):
            reductions["reduce_scatter", f"SUM {numel // edge} x float32"] += 1
        for _ in lower_edges(sizes, optim, WORLD_SIZE):
            reductions["all_reduce", f"SUM {numel // optim} x float32"] += 1
    assert set(traffic.carried("gather")) == gathers
    assert traffic.carried("reduce") == reductions


@pytest.mark.parametrize(
    "sizes, dtype",
    [
        ((2, 1, 2), torch.bfloat16),
        ((1, 2, 4), torch.float32),
        ((1, 2, 4), torch.bfloat16),
        ((2, 4, 4), torch.bfloat16),
    ],
)
def test_parameters_travel_in_the_models_dtype_and_gradients_in_fp32_as_often_as_the_sizes_ask(
    sizes, dtype
):
    run_ranks(compare_traffic, WORLD_SIZE, sizes, dtype)


def test_a_weight_that_two_modules_use_is_reduced_once_for_each_micro_batch():
    run_ranks(partial(compare_traffic, is_tied=True), WORLD_SIZE, (2, 2, 4), torch.bfloat16)


def count_with_and_without_recomputation() -> list[list[Counter]]:
    """Of each step: the first gathers on demand, the others what the one before used."""
    counts = []
    for recompute in (False, True):
        traffic = Traffic((2, 2, 4), recompute=recompute)
        counts.append([traffic.carried("gather", s) + traffic.carried("reduce", s) for s in (0, 2)])
    return counts


def test_recomputation_sends_nothing():
    for without, recomputed in run_ranks(count_with_and_without_recomputation, WORLD_SIZE):
        assert all(counted.total() > 10 for counted in without)
        assert recomputed == without


# --- the sum itself -----------------------------------------------------------------------------


def compare_first_gradients(sizes_list: list[tuple]) -> dict[tuple, float]:
    """Largest difference of a rank's bf16 model's first gradients from those that plain torch sums
    in fp32, relative to the largest gradient of the parameter."""
    expected = mean_gradients()
    worst = {}
    for sizes in sizes_list:
        trainer = EngineTrainer(build_toy(torch.bfloat16), sizes)
        trainer.runtime.zero_grads()
        for index in range(MICRO_BATCHES):
            batch = toy_batch(0, index, dist.get_rank())
            (toy_loss(trainer.model, batch) / MICRO_BATCHES).backward()
        trainer.runtime.sync_grads()
        errors = []
        for unit in trainer.runtime.units:
            whole = [expected[name] for name in unit.param_names]
            own = own_fragments(unit, whole)
            for found, true, full in zip(unit.main_grad_fragments(), own, whole, strict=True):
                if found.numel():
                    errors.append(float((found - true).abs().max() / full.abs().max()))
        worst[sizes] = largest(errors)
        trainer.runtime.close()
    return worst


def mean_gradients() -> dict[str, torch.Tensor]:
    """Of a bf16 model by plain torch, by name: summed over micro-batches and ranks in fp32."""
    model = build_toy(torch.bfloat16)
    sums = {name: torch.zeros(param.numel()) for name, param in model.named_parameters()}
    for index in range(MICRO_BATCHES):
        (toy_loss(model, toy_batch(0, index, dist.get_rank())) / MICRO_BATCHES).backward()
        for name, param in model.named_parameters():
            sums[name] += param.grad.flatten().float()
            param.grad = None
    for total in sums.values():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return sums


def test_the_first_gradients_of_a_bf16_model_are_those_of_plain_torch_summed_in_fp32():
    for worst in run_ranks(compare_first_gradients, 4, [(1, 2, 4), (2, 4, 4), (2, 1, 2)]):
        assert len(worst) == 3 and max(worst.values()) <= 1e-6, worst
