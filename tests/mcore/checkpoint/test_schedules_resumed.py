# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A run that resumes with other rates keeps its moments, and goes by the schedule that it names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint.optimizer_state import (
    OptimizerCheckpoint,
    ScheduleRule,
    pair_groups,
)
from scripts.testbed import megatron_runs
from scripts.testbed.megatron_runs import run_pretrain
from tests.support.checkpoints import SAVED_AT, Job
from tests.support.world import on_ranks

RATES = st.floats(1e-6, 1.0)
BY_FLAG = [ScheduleRule.OF_RUN, ScheduleRule.OF_CHECKPOINT]


def groups_of(
    lr: float, min_lr: float, decoupled: float | None = None, factors: tuple[float, ...] = ()
) -> list[dict[str, Any]]:
    """As Megatron builds them: with and without weight decay, each with the run's own rate, with
    that of embeddings, and with those of a parametrization."""
    rates = [(lr, min_lr, True)]
    rates += [] if decoupled is None else [(decoupled, min_lr, False)]
    rates += [(lr * factor, min_lr * factor, False) for factor in factors]
    return [
        {"wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        | {"max_lr": high, "min_lr": low, "default_config": is_own, "name": (wd, number)}
        | {"eps": number}
        for wd in (1.0, 0.0)
        for number, (high, low, is_own) in enumerate(rates)
    ]


@settings(max_examples=50, deadline=None)
@given(
    rates=st.tuples(RATES, RATES, RATES, RATES),
    more=st.sampled_from([{}, {"decoupled": 0.3}, {"factors": (0.25, 4.0)}]),
    order=st.randoms(),
)
@pytest.mark.parametrize("rule", BY_FLAG)
def test_whatever_the_rates_are_a_group_is_paired_with_its_own(rule, rates, more, order):
    before = groups_of(*rates[:2], **more)
    if "decoupled" in more:
        more = {"decoupled": rates[3]}
    now = groups_of(*rates[2:], **more)
    order.shuffle(before)
    for group, loaded in zip(now, pair_groups(now, before, rule), strict=True):
        assert group["name"] == loaded["name"]


@given(order=st.randoms())
def test_a_group_gets_the_settings_that_its_own_was_saved_with_whatever_the_order(order):
    now, before = (groups_of(1e-3, 0.0, factors=(0.25, 4.0)) for _ in range(2))
    for number, group in enumerate(before):
        group |= {"eps": 1e-8 * (number + 2), "step": 7, "params": "of the checkpoint"}
    expected = {group["name"]: group["eps"] for group in before}
    order.shuffle(before)
    run: Any = SimpleNamespace(_param_groups=[group | {"params": "own"} for group in now])
    OptimizerCheckpoint._load_groups(run, before)
    assert [group["eps"] for group in run._param_groups] == [expected[g["name"]] for g in now]
    assert all(g["params"] == "own" and "step" not in g for g in run._param_groups)


def test_without_a_flag_another_rate_is_refused_and_the_refusal_names_both_flags():
    before, now = groups_of(1e-3, 0.0), groups_of(1e-3, 1e-5)
    assert pair_groups(before, before, ScheduleRule.EQUAL) == before
    with pytest.raises(ConfigurationError, match=r"min_lr 1e-05.*--override.*--use-checkpoint-opt"):
        pair_groups(now, before, ScheduleRule.EQUAL)


@pytest.mark.parametrize("rule", ScheduleRule)
def test_what_separates_groups_is_never_overridden(rule):
    before, now = groups_of(1e-3, 0.0), groups_of(1e-3, 0.0)
    now[0]["optimizer"] = "muon"
    with pytest.raises(ConfigurationError, match="optimizer muon.*--no-load-optim"):
        pair_groups(now, before, rule)


@pytest.mark.parametrize("rule", BY_FLAG)
def test_groups_that_no_factor_pairs_are_refused(rule):
    before, now = groups_of(1.0, 0.0, factors=(2.0, 4.0)), groups_of(1.0, 0.0, factors=(2.0, 5.0))
    with pytest.raises(ConfigurationError, match="has 2 parameter groups for 2 of this run"):
        pair_groups(now, before, rule)


SAVED = ("--decoupled-lr", "0.002", "--weight-decay", "0.1")
OTHER = ("--lr", "0.004", "--min-lr", "0.001", "--decoupled-lr", "0.002",
         "--decoupled-min-lr", "0.0001", "--weight-decay", "0.4")  # fmt: skip


def resumed_schedules(folder: Path) -> dict[str, Any]:
    """Of a run that resumes by either flag: what its groups held when it began, and its moments
    beside those of one that resumes as it was."""

    def begin(flag: str, *flags: str) -> tuple[list[tuple[float, ...]], list[torch.Tensor]]:
        built: list[Any] = []
        seen: list[list[tuple[float, ...]]] = []

        def look() -> None:
            keys = ("max_lr", "min_lr", "lr", "weight_decay")
            seen.append([tuple(group[key] for key in keys) for group in built[1].param_groups])

        def moments(_: Any, optimizer: Any) -> list[torch.Tensor]:
            return [one["exp_avg"].clone() for one in optimizer.optimizer.state.values()]

        # One step, whose gradients are the same whatever the rates are.
        load = ("--load", str(folder), "--ckpt-step", str(SAVED_AT), "--train-iters")
        scheduler = f"--{flag}-opt_param-scheduler"
        argv = Job((2, 1, 2)).argv(*SAVED, *flags, *load, str(SAVED_AT + 1), scheduler)
        with megatron_runs.listening(
            look, lambda _: None, setup_model_and_optimizer=lambda found: built.extend(found)
        ):
            record = run_pretrain(argv, inspect=moments)
        return seen[0], record.inspected

    Job((2, 1, 2), SAVED).train_and_save(folder)
    return {
        "same": begin("use-checkpoint"),
        "checkpoint": begin("use-checkpoint", *OTHER),
        "run": begin("override", *OTHER),
    }


@pytest.mark.slow
def test_a_run_resumes_with_other_rates_by_either_flag_and_keeps_its_moments(tmp_path):
    for found in on_ranks(resumed_schedules, 2, tmp_path / "saved"):
        groups, moments = zip(*found.values(), strict=True)
        same, checkpoint, run = groups
        assert checkpoint == same
        assert {(high, low) for high, low, *_ in same} == {(0.003, 0.0003), (0.002, 0.0003)}
        assert {(high, low) for high, low, *_ in run} == {(0.004, 0.001), (0.002, 0.0001)}
        assert {decay for *_, decay in same} == {0.1, 0.0}
        assert {decay for *_, decay in run} == {0.4, 0.0}
        for kept in moments[1:]:
            assert all(torch.equal(*pair) for pair in zip(kept, moments[0], strict=True))
            assert any(moment.any() for moment in kept)
