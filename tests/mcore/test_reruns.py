# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Steps that Megatron's rerun machine repeats: with the bits of a step that nothing disturbs."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.megatron_flags import BF16, FULL_RECOMPUTE, MIXTURE_OF_EXPERTS, size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.mcore.test_data_parallel import tiny_config, wrap
from tests.support.world import on_ranks

STEPS, DISTURBED = 4, 2
FIRST = 8  # the run goes on from seven steps
NOT_A_NUMBER, INFINITE, LARGE = float("nan"), float("inf"), 1e3
TRANSIENT, REPRODUCIBLE, GOES_ON = (False, True, 17), (True, True, 16), (False, False, 0)


def _steps(factor: float, num_wrong: int) -> tuple[list[tuple], list[list[float]]]:
    """Of each step: how often it ran, what the machine says then, and the engine's number of it;
    and its gradients. The first `num_wrong` runs of one step have gradients times `factor` on rank
    1, both checks of gradients are asked for, and have seen a hundred values."""
    from megatron.core import rerun_state_machine
    from megatron.core.transformer.module import MegatronModule

    rerun_state_machine.destroy_rerun_state_machine()
    mode = rerun_state_machine.RerunMode.VALIDATE_RESULTS
    rerun_state_machine.initialize_rerun_state_machine(mode=mode)
    machine = rerun_state_machine.get_rerun_state_machine()
    machine.large_value_counts["grads"], machine.max_values["grads"] = 100, 20.0
    torch.manual_seed(1)
    module: Any = MegatronModule(tiny_config())
    module.linear = torch.nn.Linear(8, 8)
    module.forward = lambda x: module.linear(x)
    (chunk,) = wrap([module], (2, 2, 2), check_for_nan_in_grad=True, check_for_large_grads=True)
    said: list[tuple] = []
    grads: list[list[float]] = []
    for step in range(STEPS):
        chunk.communication.number_of_step = lambda step=step: FIRST + step
        num_runs = 0
        while machine.should_run_forward_backward(None):
            chunk.zero_grad_buffer()
            is_wrong = step == DISTURBED and num_runs < num_wrong and dist.get_rank() == 1
            (chunk(torch.rand(2, 8)).sum() * (factor if is_wrong else 1.0)).backward()
            chunk.finish_grad_sync()
            num_runs += 1
        said.append((num_runs, machine.should_checkpoint_and_exit(), chunk.runtime.step))
        grads.append(chunk.units[0].main_grad.view(chunk.units[0].optim_range).tolist())
        if said[-1][1][1]:
            break
    chunk.communication.close()
    rerun_state_machine.destroy_rerun_state_machine()
    return said, grads


def _all_steps() -> dict[tuple, tuple]:
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    kinds = [(1.0, 0), *((factor, n) for factor in (NOT_A_NUMBER, INFINITE, LARGE) for n in (1, 2))]
    return {kind: _steps(*kind) for kind in kinds}


def test_a_step_is_repeated_with_its_number_and_the_bits_of_one_that_nothing_disturbed():
    for found in on_ranks(_all_steps, 2):
        undisturbed, grads = found.pop((1.0, 0))
        assert undisturbed == [(1, GOES_ON, FIRST + step) for step in range(STEPS)]
        ends = [TRANSIENT, REPRODUCIBLE] * 2 + [GOES_ON] * 2  # only NaN and Inf end a run
        for ((factor, num_wrong), (said, others)), end in zip(found.items(), ends, strict=True):
            steps = STEPS if end == GOES_ON else DISTURBED + 1
            expected = undisturbed[:steps]
            expected[DISTURBED] = (2, end, FIRST + DISTURBED)
            assert said == expected, (factor, num_wrong)
            for step, (one, other) in enumerate(zip(grads, others)):
                is_wrong = step == DISTURBED and num_wrong == 2
                assert (one == other) is not is_wrong, (factor, num_wrong, step)


def _refused_losses(monkeypatch: pytest.MonkeyPatch, **asked: bool) -> list[tuple[str, bool]]:
    """Of some losses after a hundred that were 2 at most: those that are refused, each with whether
    that is to end the run."""
    from megatron.core.rerun_state_machine import RerunStateMachine

    from scripts.train import loss_checks

    machine, refused = RerunStateMachine(), list[tuple[float, bool]]()
    machine.large_value_counts["loss"], machine.max_values["loss"] = 100, 2.0

    def validate(result: Any, rejection_func: Any, fatal: bool, **_: Any) -> None:
        if rejection_func(result):
            refused.append((result.item(), fatal))

    monkeypatch.setattr(machine, "validate_result", validate)
    monkeypatch.setattr(loss_checks, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(loss_checks, "get_args", lambda: Namespace(**asked))
    for loss in (2.0, 19.0, 20.0, INFINITE, NOT_A_NUMBER):
        loss_checks.check_loss(torch.tensor(loss))
    return [(str(loss), is_fatal) for loss, is_fatal in refused]  # NaN equals nothing


@pytest.mark.parametrize("looks_for_nan", [True, False])
@pytest.mark.parametrize("looks_for_spiky", [True, False])
def test_a_loss_is_refused_where_it_is_not_finite_or_spiky_as_the_flags_ask(
    monkeypatch, looks_for_nan, looks_for_spiky
):
    refused = _refused_losses(
        monkeypatch,
        check_for_nan_in_loss_and_grad=looks_for_nan,
        check_for_spiky_loss=looks_for_spiky,
    )
    not_finite = [("inf", True), ("nan", True)]
    assert refused == [("20.0", False)] * looks_for_spiky + not_finite * looks_for_nan


# ---- Megatron's own runs

INJECTED = ("--error-injection-rate", "8", "--error-injection-type")
# These alone end no run.
CHECKS_LARGE = ("--no-check-for-nan-in-loss-and-grad", "--check-for-large-grads")
SHARDED = size_flags((2, 2, 2))
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
VIRTUAL_STAGES = ("--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
KEPT = ("--asynchzp-keep-params-gb", "0.0001", "--asynchzp-keep-grads-gb", "0.0001")
WAYS = {
    "replicas of parameters": [*BF16, *size_flags((1, 1, 2))],
    "collectives of the main thread": [*BF16, *SHARDED, "--asynchzp-schedule", "main-thread"],
    "fp32, inline": [*size_flags((1, 2, 2)), "--asynchzp-schedule", "inline"],
    "early update": [*BF16, *SHARDED, "--asynchzp-early-update", "on", "--clip-grad", "50"],
    "budgets": [*BF16, *SHARDED, *KEPT],
    "recomputation, dropout": [*BF16, *SHARDED, *FULL_RECOMPUTE, *DROPOUT],
    "pipeline": [*size_flags((1, 1, 1)), "--pipeline-model-parallel-size", "2", *VIRTUAL_STAGES],
    "experts": [*BF16, *SHARDED, *MIXTURE_OF_EXPERTS, "--expert-model-parallel-size", "2"],
}


def _states(chunks: list, _: Any) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    for chunk in chunks:
        chunk.runtime.settle()
        for unit in chunk.units:
            kept += [unit.model_param.storage, unit.main_param.storage]
            kept += chunk.communication.moments_of(unit)
    return [one.clone() for one in kept]


def _same_bits(one: Any, other: Any) -> tuple[bool, bool]:
    """Whether losses and norms of two runs are equal, and their states."""
    states = zip(one.inspected, other.inspected, strict=True)
    return one.losses_and_norms == other.losses_and_norms, all(
        torch.equal(*pair) for pair in states
    )


def _with_and_without_reruns(folder: str) -> dict[str, tuple[bool, bool]]:
    """Of each way: whether losses and states have the same bits."""
    found: dict[str, tuple[bool, bool]] = {}
    for number, (way, flags) in enumerate(WAYS.items()):
        argv = gpt_args("--train-iters", "4", *flags)
        notes = f"{folder}/{number}"
        more = [*INJECTED, "transient_error", *CHECKS_LARGE]
        once = run_pretrain(argv, inspect=_states)
        again = run_pretrain(
            [*argv, *more, "--result-rejected-tracker-filename", notes], inspect=_states
        )
        assert Path(notes).read_text().count("FIRST_RERUN_NOT_REPRODUCIBLE") >= 2, way
        found[way] = _same_bits(once, again)
    return found


@pytest.mark.slow
def test_a_run_whose_steps_are_repeated_has_the_bits_of_one_whose_steps_are_not(tmp_path):
    for found in on_ranks(_with_and_without_reruns, 2, str(tmp_path)):
        assert found == dict.fromkeys(WAYS, (True, True))


def _ends(folder: str, flags: list[str]) -> dict[str, list[int]]:
    """For each kind of injected error, the exit statuses of a run, and after 16 those of a run that
    resumes on the same node, and of one that resumes on another."""

    def end(argv: list[str]) -> int:
        try:
            run_pretrain(argv)
        except SystemExit as ended:
            return int(str(ended.code))
        return 0

    ends: dict[str, list[int]] = {}
    for kind in ("transient_error", "persistent_error", "correct_result"):
        saved = f"{folder}/{kind}"
        argv = gpt_args("--train-iters", "4", *BF16, *flags, *INJECTED, kind)
        argv += ["--save", saved, "--save-interval", "100"]
        ends[kind] = [end(argv)]
        if ends[kind] == [16]:
            ends[kind].append(end([*argv, "--load", saved]))
            system, _, *release = os.uname()
            with mock.patch.object(os, "uname", return_value=(system, "another", *release)):
                ends[kind].append(end([*argv, "--load", saved]))
    return ends


@pytest.mark.slow
def test_an_injected_error_ends_a_run_with_the_status_that_it_has_in_stock_megatron(tmp_path):
    for name, flags in {"ours": SHARDED, "stock": ["--use-distributed-optimizer"]}.items():
        for ends in on_ranks(_ends, 2, str(tmp_path / name), flags):
            assert ends.pop("transient_error") == [17]
            assert ends == {"persistent_error": [16, 16, 17], "correct_result": [16, 16, 17]}
