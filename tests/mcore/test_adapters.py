# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters in a frozen model of Megatron train as stock Megatron trains them, and what is frozen
costs its parameter shard and its gathers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest

from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.adapters import RANK, adapted_and_seeded, add_adapters
from scripts.testbed.differences import worst_difference
from scripts.testbed.megatron_flags import (
    BF16,
    DISTRIBUTED_OPTIMIZER,
    FULL_RECOMPUTE,
    PIPELINE_PARALLEL,
    TENSOR_PARALLEL,
    UNTIED,
    size_flags,
)
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.mcore.test_muon_runs import MUON
from tests.mcore.test_parity import TWO_EXPERT_RANKS
from tests.support.engine import on_submit
from tests.support.parity import Sizes
from tests.support.world import on_ranks

pytestmark = pytest.mark.slow

STEPS, TOLERANCE = 20, 1e-6
LAYERS = 2
# fmt: off
LLAMA = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
         "--position-embedding-type", "rope", "--group-query-attention", "--num-query-groups", "2",
         *UNTIED]
# fmt: on
QWEN2 = [*LLAMA, "--add-qkv-bias"]
FOUR_RANKS: list[Sizes] = [(4, 4, 4), (2, 2, 4), (1, 2, 4), (1, 1, 1)]
TWO_RANKS: list[Sizes] = [(2, 2, 2), (1, 2, 2), (1, 1, 2), (1, 1, 1)]


class Found(NamedTuple):
    """Of one run. lanes: of the operations of frozen units; frozen: bytes of each at rest;
    trained: units, by name."""

    losses: Sequence[float | None]
    norms: Sequence[float | None]
    lanes: set[str]
    frozen: list[dict[str, int]]
    trained: list[str]


@contextmanager
def _noting_submissions(seen: Counter[tuple[str, str]]) -> Iterator[None]:
    """Count (lane, unit) of what a run with --use-asynchzp submits."""
    from megatron.training import training

    set_up = training.setup_model_and_optimizer

    def noted(*args: Any, **kwargs: Any) -> Any:
        built = set_up(*args, **kwargs)
        communication = getattr(built[0][0], "communication", None)
        if communication is not None:
            on_submit(communication.driver, lambda task: seen.update([(task.lane, task.unit)]))
        return built

    with mock.patch.object(training, "setup_model_and_optimizer", noted):
        yield


def _units_of(chunks: Any, _: Any) -> list[tuple[str, bool, dict[str, int]]]:
    units = [unit for chunk in chunks for unit in getattr(chunk, "units", ())]
    return [(unit.name, unit.is_trained, unit.state_nbytes()) for unit in units]


def run(flags: Sequence[str], prepare: Callable = adapted_and_seeded) -> Found:
    """Collective: STEPS of Megatron's pretrain()."""
    seen: Counter[tuple[str, str]] = Counter()
    argv = gpt_args("--train-iters", str(STEPS), "--lr", "1e-2", *flags)
    with _noting_submissions(seen):
        record = run_pretrain(argv, _units_of, prepare)
    units = record.inspected
    frozen = {name: nbytes for name, is_trained, nbytes in units if not is_trained}
    return Found(
        record.losses,
        record.grad_norms,
        {lane for lane, name in seen if name in frozen},
        list(frozen.values()),
        [name for name, is_trained, _ in units if is_trained],
    )


def train_all(commands: Sequence[Sequence[str]], prepare: Callable) -> list[Found]:
    return [run(flags, prepare) for flags in commands]


def trained(
    ranks: int, *commands: Sequence[str], prepare: Callable = adapted_and_seeded
) -> list[Found]:
    """What rank 0 of `ranks` found, of each command line."""
    return on_ranks(train_all, ranks, commands, prepare, timeout_s=600)[0]


def assert_same(ours: Found, theirs: Found, tolerance: float = TOLERANCE) -> None:
    assert theirs.losses[-1] < theirs.losses[0] - 0.01  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
    assert worst_difference(ours.losses, theirs.losses) < tolerance
    assert worst_difference(ours.norms, theirs.norms) < tolerance


@pytest.mark.parametrize("model", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize(
    "parallel, all_sizes",
    [([], FOUR_RANKS), (TENSOR_PARALLEL, TWO_RANKS)],
    ids=["4 replicas", "2 replicas of 2 tensor-parallel ranks"],
)
def test_adapters_train_as_in_stock_megatron_and_in_one_process_and_the_base_is_only_gathered(
    model, parallel, all_sizes
):
    flags = [*model, *parallel]
    stock = [flags, [*flags, *DISTRIBUTED_OPTIMIZER]]
    runs = trained(4, *stock, *([*flags, *size_flags(sizes)] for sizes in all_sizes))
    (alone,) = trained(1, model)
    for sizes, ours in zip(all_sizes, runs[2:], strict=True):
        for theirs in (*runs[:2], alone):
            assert_same(ours, theirs)
        assert ours.lanes == ({"gather"} if sizes[0] > 1 else set())
        assert len(ours.frozen) >= LAYERS + 3  # embedding, output layer, final norm
        assert all(one["main_grad"] == one["main_param"] == 0 for one in ours.frozen)
        # The adapters of a layer are one unit.
        assert ours.trained == [f"decoder.layers.{layer}#2" for layer in range(LAYERS)]


# What in Megatron has a rule of its own for gradients, and might take a frozen weight for a
# trained one.
# fmt: off
RULES = {
    "sequence parallel": [*LLAMA, *TENSOR_PARALLEL, "--sequence-parallel"],
    "tied over a pipeline": [*LLAMA[:-1], *PIPELINE_PARALLEL],
    "experts on 2 ranks": [*LLAMA, *TWO_EXPERT_RANKS, "--lr", "3e-3"],
    "recomputed": [*LLAMA, *FULL_RECOMPUTE],
    "early updates": [*LLAMA, "--clip-grad", "0.0"],
}
# fmt: on


def test_adapters_train_as_in_stock_megatron_under_every_rule_for_gradients():
    ours = [
        [*flags, *size_flags((1, 2, 2)), "--asynchzp-early-update", "auto"]
        for flags in RULES.values()
    ]
    runs = trained(4, *RULES.values(), *ours)
    for theirs, mine in zip(runs[: len(RULES)], runs[len(RULES) :], strict=True):
        assert_same(mine, theirs)


def test_adapters_that_are_all_matrices_leave_muon_no_other_optimizer():
    flags = [*LLAMA, *MUON, "--lr", "3e-3"]
    stock, ours = trained(4, flags, [*flags, *size_flags((2, 2, 4))])
    assert_same(ours, stock, 1e-5)


def test_a_base_that_is_sharded_while_it_is_built_is_the_same_base_in_every_precision():
    # Megatron's own initialisation, which leaves the parts of a module where they are.
    commands = [[*LLAMA, *dtype] for dtype in ([], BF16)]
    ours = [[*flags, *size_flags((4, 4, 4))] for flags in commands]
    runs = trained(4, *commands, *ours, prepare=add_adapters)
    for theirs, mine in zip(runs[:2], runs[2:], strict=True):
        assert worst_difference(mine.losses[:1], theirs.losses[:1]) < TOLERANCE
        assert worst_difference(mine.norms[:1], theirs.norms[:1]) < TOLERANCE


# ---- what the flags of the planner say of the adapters


RIGHT, FC1 = ["--asynchzp-adapter-rank", str(RANK)], ["--asynchzp-adapter-layers", "linear_fc1"]
DESCRIBED: list[tuple[Sequence[str], Callable | None, bool]] = [  # flags, a run, is it refused
    (RIGHT, adapted_and_seeded, False),
    ([*RIGHT, *FC1], partial(add_adapters, targets=("linear_fc1",)), False),
    (["--asynchzp-adapter-rank", str(RANK + 1)], adapted_and_seeded, True),
    ([*RIGHT, *FC1], adapted_and_seeded, True),
    (RIGHT, None, True),  # all is trained
]


def refused_lines(flags: Sequence[str]) -> list[str]:
    """Collective: what a step of each of DESCRIBED is refused with, "" for nothing."""
    lines: list[str] = []
    for described, prepare, _ in DESCRIBED:
        try:
            run_pretrain(gpt_args("--train-iters", "1", *flags, *described), _units_of, prepare)
            lines.append("")
        except ConfigurationError as error:
            lines.append(str(error))
    return lines


@pytest.mark.parametrize(
    "flags",
    [size_flags((2, 2, 2)), [*TENSOR_PARALLEL, *size_flags((1, 1, 1))]],
    ids=["2 replicas", "2 tensor-parallel ranks"],
)
def test_a_run_that_trains_other_adapters_than_its_flags_describe_is_refused_on_every_rank(flags):
    for lines in on_ranks(refused_lines, 2, [*LLAMA, *flags], timeout_s=250):
        for line, (_, _, is_refused) in zip(lines, DESCRIBED, strict=True):
            said = line.startswith("--asynchzp-adapter-rank ") and "leave the flags out" in line
            assert (said and "\n" not in line) if is_refused else line == "", lines
