# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What FP8 and FP4 layers over sharded parameters hold beside the states, and what their gathers
bring over the link, counted on the emulated device."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import FULL_RECOMPUTE, size_flags
from scripts.testbed.megatron_runs import Steps, listening, on_device, run_pretrain, seed_parameters
from scripts.testbed.profile import PROFILES
from tests.device.test_transformer_engine import (
    BASE,
    CODES,
    FEWER,
    GROUPED_EXPERTS,
    RECIPES,
    env_of,
)

pytestmark = pytest.mark.slow

# So many parameters that what is beside them is little.
WIDE = [*BASE, *FEWER, "--hidden-size", "256", "--train-iters", "3"]
# So many tokens that what autograd keeps is a good part.
LONG = ["--seq-length", "256", "--max-position-embeddings", "256", "--micro-batch-size", "2"]


class Held(NamedTuple):
    """Bytes on the device after a run: counted, by formula at rest, by formula in flight, and of
    quantised copies; planned: what the planner has at rest, in flight and as copies."""

    counted: int
    states: float
    flying: float
    copies: float
    planned: float


def held(model_chunks: list, optimizer: Any) -> tuple[int, float, float, float, float]:
    from megatron.training import get_args

    from megatron_asynchzp.mcore.run.planned import costing_of
    from megatron_asynchzp.mcore.start.low_precision import kept_nbytes

    memory = costing_of(get_args()).stage_memory(0)
    gc.collect()
    flying = 0
    for chunk in model_chunks:
        chunk.runtime.settle()
        flying += sum(chunk.runtime.in_flight_nbytes().values())
    copies = sum(kept_nbytes(chunk.module, chunk.config) for chunk in model_chunks)
    counted = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return counted, memory.states, flying, copies, memory.states + memory.flying


def train_each(lines: Sequence[Sequence[str]]) -> list[Held]:
    """The last one first: Transformer Engine then makes the workspaces of its products."""
    found = []
    for line in [lines[-1], *lines]:
        gc.collect()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        with on_device(uses_te=True):
            counted, *formula = run_pretrain([*line], inspect=held).inspected
        found.append(Held(counted - before, *formula))
    return found[1:]


def lines_of(recipes: Sequence[str]) -> list[list[str]]:
    return [[*WIDE, *RECIPES[recipe], *size_flags((2, 2, 2))] for recipe in recipes]


@pytest.mark.parametrize(
    "recipes", [["tensorwise", "delayed", "blockwise", "bf16"], ["mxfp8", "nvfp4"]]
)
def test_what_a_recipe_holds_after_a_step_is_what_the_formula_and_the_planner_have(
    te_worlds: DeviceWorlds, recipes: list[str]
):
    lines = lines_of(recipes)
    if "blockwise" in recipes:
        lines.append([*lines[recipes.index("blockwise")], *GROUPED_EXPERTS])
    found = te_worlds.run(train_each, 2, lines, timeout_s=1200, env=env_of(recipes[0]))[0]
    for line, one in zip(lines, found, strict=True):
        print(line, one)
        assert one.counted == pytest.approx(one.states + one.flying + one.copies, rel=0.01), line
        assert one.counted == pytest.approx(one.planned, rel=0.025), line
        assert (one.copies > 0) == ("delayed" in line or "--moe-grouped-gemm" in line)


class Highest(NamedTuple):
    """Bytes at most of each step, counted, and as the dry run has it; kept: what of that autograd
    keeps for backward."""

    counted: list[int]
    planned: float
    kept: float


def planned_peak(model_chunks: list, optimizer: Any) -> tuple[float, float]:
    from megatron.training import get_args

    from megatron_asynchzp.mcore.run.planned import costing_of

    memory = costing_of(get_args()).stage_memory(0)
    return memory.training, memory.activations.kept


def peaks_of(lines: Sequence[Sequence[str]]) -> list[Highest]:
    """The last one first, as train_each."""
    from scripts.testbed.te.peak import Peak

    found = []
    for line in [lines[-1], *lines]:
        gc.collect()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        steps: list[Peak] = []

        def begin(steps: list[Peak] = steps) -> None:
            steps.append(Peak().__enter__())

        def end(_logged: dict[str, Any], steps: list[Peak] = steps) -> None:
            steps[-1].__exit__()

        with listening(begin, end), on_device(uses_te=True):
            planned = run_pretrain([*line], inspect=planned_peak).inspected
        found.append(Highest([step.nbytes - before for step in steps], *planned))
    return found[1:]


@pytest.mark.parametrize("recipes", [["tensorwise", "delayed", "blockwise", "bf16"], ["mxfp8"]])
def test_the_most_that_a_step_holds_is_what_the_dry_run_predicts(
    te_worlds: DeviceWorlds, recipes: list[str]
):
    """With activations that are a fifth of it, and without what the stand-in's kernels take for
    themselves (scripts.testbed.te.peak)."""
    lines = [[*line, *LONG] for line in lines_of(recipes)]
    found = te_worlds.run(peaks_of, 2, lines, timeout_s=1200, env=env_of(recipes[0]))[0]
    for recipe, one in zip(recipes, found, strict=True):
        print(recipe, one)
        assert max(one.counted) == pytest.approx(one.planned, rel=0.025), recipe
        assert one.kept > 0.17 * one.planned


class Sent(NamedTuple):
    """gathered: bytes that this rank handed to gathers, and agreed: to what agrees on scales;
    step_ms: of each step but the first, by the device's clock."""

    losses: Steps
    gathered: int
    agreed: int
    step_ms: list[float]


def widened(chunks: list) -> list:
    """Parameters of such a range that codes of rows and of columns have other values."""
    made = torch.Generator().manual_seed(1)
    for param in (param for chunk in seed_parameters(chunks) for param in chunk.parameters()):
        if param.dim() == 2:
            sides = [torch.randint(-12, 1, (size,), generator=made) for size in param.shape]
            param.data *= (2.0 ** (sides[0][:, None] + sides[1])).to(param)
    return chunks


def train_counting(line: Sequence[str]) -> Sent:
    from megatron_asynchzp.engine.comm import collectives

    nbytes, marks = {"gathered": 0, "agreed": 0}, []
    gather, reduce = collectives.all_gather_flat, collectives.all_reduce_steps

    def counted_gather(full: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
        nbytes["gathered"] += shard.nbytes * len(marks[:1])
        return gather(full, shard, **options)

    def counted_reduce(shard: torch.Tensor, axes: Any, *op: Any) -> Any:
        nbytes["agreed"] += shard.nbytes * len(marks[:1])
        return reduce(shard, axes, *op)

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    with (
        mock.patch.object(collectives, "all_gather_flat", counted_gather),
        mock.patch(
            "megatron_asynchzp.engine.comm.low_precision_gather.all_reduce_steps", counted_reduce
        ),
        listening(mark, lambda logged: None),
        on_device(uses_te=True),
    ):
        record = run_pretrain([*line], prepare=widened if "1e-6" in line else None)
    torch.cuda.synchronize()
    steps = [before.elapsed_time(after) for before, after in zip(marks[1:], marks[2:])]
    return Sent(record.losses_and_norms, *nbytes.values(), steps)


def train_on_a_slow_network(line: Sequence[str]) -> list[Sent]:
    from scripts.testbed.device import inside

    inside.state_time(PROFILES["slower-between-nodes"])
    codes = ["--fp4-param-gather"] if "--fp4-format" in line else CODES
    return [train_counting(line), train_counting([*line, *codes])]


@pytest.mark.parametrize(
    ("recipe", "share", "more", "sizes"),
    [
        # The first step and the layer at the turn come in bf16.
        ("mxfp8", 0.8, ["--num-layers", "6"], (2, 2, 2)),
        ("mxfp8", 0.8, ["--num-layers", "6"], (2, 1, 2)),
        ("mxfp8", 0.85, ["--num-layers", "6", *FULL_RECOMPUTE], (2, 2, 2)),
        ("nvfp4", 0.3, ["--num-layers", "4"], (2, 2, 2)),
        ("nvfp4", 0.3, ["--num-layers", "4", *GROUPED_EXPERTS], (2, 1, 2)),
    ],
)
def test_gathers_in_mxfp8_and_nvfp4_have_the_bits_of_those_in_bf16_and_fewer_bytes(
    te_worlds: DeviceWorlds, recipe: str, share: float, more: list[str], sizes: tuple
):
    line = [*WIDE, *RECIPES[recipe], *more, *size_flags(sizes), "--train-iters", "6"]
    line += ["--lr", "1e-6", "--min-lr", "1e-7"]  # small weights stay small
    env = env_of(recipe)
    plain, coded = te_worlds.run(train_on_a_slow_network, 2, line, timeout_s=850, env=env)[0]
    print(plain, coded)
    assert coded.losses == plain.losses and len({loss for loss, _ in plain.losses}) == 6
    # Of codes by rows alone shards cut none.
    assert plain.agreed == 0 and (coded.agreed > 0) == ("full" not in more)
    assert (coded.gathered + coded.agreed) / plain.gathered <= share
    assert min(coded.step_ms) < min(plain.step_ms)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_gathers_as_codes_bring_half_of_the_bytes_and_a_shorter_step_on_a_slow_network(
    te_worlds: DeviceWorlds, recipe: str
):
    line = [*WIDE, *RECIPES[recipe], "--num-layers", "4", *size_flags((2, 2, 2))]
    plain, coded = te_worlds.run(train_on_a_slow_network, 2, line, timeout_s=590)[0]
    print(plain, coded)
    assert coded.losses == plain.losses and plain.agreed == 0 < coded.agreed
    assert 0.50 <= (coded.gathered + coded.agreed) / plain.gathered <= 0.52
    assert max(coded.step_ms) < 0.95 * min(plain.step_ms)
