# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Units that are sent before the norm of all gradients is known: the bits are those of the update
after it, whatever becomes of a step.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.schedule import SCHEDULES, ScheduleConfig
from megatron_asynchzp.engine.zero.early_update import (
    EarlySends,
    EarlyUpdate,
    is_elementwise,
    step_beside,
)
from megatron_asynchzp.engine.zero.step import StepScheduler
from scripts.testbed.contenders.adam import owned_params
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy, toy_batch, toy_loss


class ScaledAdam(torch.optim.AdamW):
    """As Transformer Engine's with moments of 16 bits: it has more by parameter than its state, and
    a count of steps in its groups."""

    is_elementwise = True

    def __init__(self, params, **options):
        super().__init__(params, **options)
        every = [param for group in self.param_groups for param in group["params"]]
        self._scales = {param: {"exp_avg": torch.ones(1)} for param in every}

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                self._scales[param]["exp_avg"] *= 1.5
                if param.grad is not None:
                    param.grad = param.grad * self._scales[param]["exp_avg"] / group["steps"]
        super().step(closure)


PASSES, IS_CLIPPED, IS_SKIPPED, IS_BEGUN_AGAIN, IS_USED_AGAIN, EVALUATES = range(6)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TIED, RECOMPUTED = {"is_tied": True}, {"recompute": True}
WAYS = list(product(SCHEDULES, (False, True)))


def take_step(trainer: EngineTrainer, step: int, fate: int) -> float:
    """Returns the loss of this rank."""
    runtime = trainer.runtime
    micro_batches = 1 + step % 2
    if fate == IS_BEGUN_AGAIN:  # as a rerun of Megatron's does it
        trainer.backward(step, micro_batches)
        runtime.zero_grads()
    loss = trainer.backward(step, micro_batches)
    if fate == IS_USED_AGAIN:
        runtime.is_last_micro_batch = True
        loss += trainer.backward(step, 1, begins=False)
    runtime.sync_grads()
    if fate == EVALUATES:
        with torch.no_grad():
            loss += toy_loss(trainer.model, toy_batch(step, 7, 0))
    if fate == IS_SKIPPED:
        runtime.skip_update() if step % 2 else None
    else:
        trainer.update(0.9 if fate == IS_CLIPPED else 1.0)
    return loss.item()


def train(
    kind: str,
    sends_early: bool | None,
    sizes: Sequence[int],
    dtype: torch.dtype,
    toy: dict,
    chosen: Iterable[int],
) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, all that this rank owns at the end, and how many units were sent early."""
    schedule = ScheduleConfig(kind, grad_slot_nbytes=2048)
    model = build_toy(dtype, depth=5, **toy)
    trainer = EngineTrainer(model, sizes, schedule=schedule, sends_early=sends_early)
    sent = []
    start_early_send = trainer.runtime.gathers.start_early_send
    trainer.runtime.gathers.start_early_send = lambda unit: (
        sent.append(unit),
        start_early_send(unit),
    )
    said: list[str] = []
    log = logging.getLogger("megatron_asynchzp")
    log.addFilter(note := lambda record: said.append(record.getMessage()) or True)
    losses = [take_step(trainer, step, fate) for step, fate in enumerate(chosen)]
    log.removeFilter(note)
    trainer.runtime.settle()
    state = trainer.optimizer.state.values()
    owned = [unit.model_param.storage.clone() for unit in trainer.runtime.units]
    owned += [unit.main_param.storage.clone() for unit in trainer.runtime.units]
    owned += [value for one in state for value in one.values()]
    is_logged = "early" in trainer.runtime.gathers.warned
    assert is_logged == (IS_USED_AGAIN in chosen and bool(sent))
    if dist.get_rank() == 0:  # in the words of who wrote the loop
        assert (
            any("micro-batches but the last into no_sync()" in line for line in said) == is_logged
        )
    trainer.runtime.close()
    trainer.runtime.close()
    return losses, owned, len(sent)


def compare_with_late(cases: Iterable[tuple], chosen: Sequence[int], ways: Sequence = WAYS) -> int:
    """cases: sizes, dtype and toy. Returns how many units were sent early."""
    total = 0
    for sizes, dtype, toy in cases:
        losses, owned, none = train("inline", None, sizes, dtype, toy, chosen)
        assert none == 0
        for kind, is_forced in ways:
            found, others, num_sent = train(kind, is_forced, sizes, dtype, toy, chosen)
            total += num_sent
            assert found == losses, (kind, is_forced, sizes, dtype, toy)
            for one, other in zip(owned, others, strict=True):
                assert torch.equal(one, other), (kind, is_forced, sizes, dtype, toy)
    return total


FAST_CASES = [((2, 2, 4), FP32, TIED), ((1, 2, 4), BF16, {}), ((1, 1, 2), FP32, RECOMPUTED)]
# Of the first a third is sent where there is room; of the second, in bf16, nothing unless forced.
FAST_WAYS = [("main-thread", False), ("threaded", True)]
FAST_FATES = [PASSES, IS_CLIPPED, PASSES, EVALUATES, IS_SKIPPED, IS_SKIPPED, IS_BEGUN_AGAIN, PASSES]


def compare_in_turn(cases: Sequence[tuple], ways: Sequence[tuple]) -> bool:
    """Each case in one of the ways."""
    return all(
        compare_with_late([case], FAST_FATES, [way]) for case, way in zip(cases, ways, strict=True)
    )


def test_the_bits_are_those_of_an_update_after_the_norm_whatever_becomes_of_a_step():
    assert all(run_ranks(compare_in_turn, 4, FAST_CASES[:2], FAST_WAYS))


def compare_each(cases: list[tuple], all_chosen: list[list[int]], ways: list) -> list[int]:
    return [compare_with_late(cases, chosen, ways) for chosen in all_chosen]


def test_a_model_that_is_used_again_after_its_last_micro_batch_is_no_longer_sent_early():
    chosen = [PASSES, IS_USED_AGAIN, IS_CLIPPED, PASSES, PASSES]
    cases, ways = [((1, 2, 4), BF16, {})], [("threaded", True)]
    for in_all, in_two in run_ranks(compare_each, 4, cases, [chosen, chosen[:2]], ways):
        assert in_all == in_two > 0


def add_a_gradient_late(sends_early: bool | None) -> list[list]:
    """A gradient that no module's backward brings, as that of a norm of the parameters."""
    trainer = EngineTrainer(build_toy(BF16), (1, 2, 2), sends_early=sends_early)
    for step in range(2):
        trainer.backward(step, 1)
        param = trainer.runtime.units[0].params[0]
        param.grad = torch.ones_like(param)
        trainer.runtime.sync_grads()
        trainer.update()
    found = [param.tolist() for param in trainer.full_params().values()]
    trainer.runtime.close()
    return found


def train_with_scales(sends_early: bool | None) -> tuple[list[list], int]:
    trainer = EngineTrainer(build_toy(BF16), (1, 2, 2))
    owned = {unit: owned_params(unit) for unit in trainer.runtime.units}
    params = [param for params in owned.values() for param in params]
    trainer.optimizer = ScaledAdam(params, lr=1e-2)
    if sends_early:
        trainer.runtime.early_sends.early_update = EarlyUpdate(
            trainer.optimizer, owned, is_forced=True
        )
    for step in range(4):
        trainer.backward(step, 1)
        trainer.runtime.sync_grads()
        for unit, params in owned.items():
            grads = [grad for grad in unit.main_grad_fragments() if grad.numel()]
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        trainer.update(0.5 if step == 2 else 1.0)
    found = [param.tolist() for param in trainer.full_params().values()]
    trainer.runtime.close()
    return found, trainer.optimizer.param_groups[0]["steps"]


def test_what_an_optimizer_has_by_parameter_beside_its_state_is_copied_too():
    early, late = (run_ranks(train_with_scales, 2, way) for way in (True, None))
    assert early == late and all(steps == 4 for _, steps in early)


def test_an_optimizer_is_elementwise_where_that_is_known_of_its_very_class():
    param = [torch.nn.Parameter(torch.zeros(1))]
    assert is_elementwise(torch.optim.AdamW(param)) and is_elementwise(ScaledAdam(param))
    own = type("Own", (torch.optim.AdamW,), {})
    assert not is_elementwise(own(param))
    assert not is_elementwise(torch.optim.LBFGS(param))


def test_a_step_stands_where_one_of_its_model_chunks_does_whichever_is_noted_last():
    """Three steps in vain end early updates until the 64th step after them."""
    param, unit = torch.nn.Parameter(torch.zeros(4)), "of one of the chunks"
    for outcomes, may_send in (
        ([(True, False)] * 3, True),
        ([(False, True)] * 3, True),
        ([(False, False)] * 3, False),
        ([(False, False), (True, False), (False, False)], True),
    ):
        early = EarlyUpdate(torch.optim.SGD([param]), {unit: [param]})
        for step, of_chunks in enumerate(outcomes, 1):
            for did_stand in of_chunks:
                early.note_outcome(step, did_stand)
        assert early.may_send(unit, 4) == may_send, outcomes
    vain = EarlyUpdate(torch.optim.SGD([param]), {unit: [param]})
    for step in (1, 2, 3):
        vain.note_outcome(step, False)
    assert [vain.may_send(unit, step) for step in (4, 66, 67, 68)] == [False, False, True, True]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, ScaledAdam])
def test_steps_of_one_parameter_beside_the_optimizer_are_the_optimizers_own(kind):
    def new() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        params = [torch.nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)]
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        groups = [{"params": [param], "lr": 0.1 * (1 + n)} for n, param in enumerate(params)]
        return params, kind(groups, **options)

    (whole, optimizer), (apart, other) = new(), new()
    other.register_step_pre_hook(lambda *_: pytest.fail("a hook of the optimizer's own step"))
    before = apart[0].tolist()
    for step in range(3):
        for param in (*whole, *apart):
            param.grad = torch.tensor([0.5, -1.0]) * (step + 1)
        optimizer.step()
        step_beside(other, [(apart[1], other.param_groups[1])])
        if kind is not ScaledAdam:  # whose groups count steps
            assert torch.equal(apart[1], whole[1])
        assert apart[1].tolist() != before and apart[0].tolist() == before


@pytest.mark.parametrize("num_skipped", [1, 2, 3])
def test_after_three_skipped_steps_nothing_is_sent_early(num_skipped):
    param, unit = torch.nn.Parameter(torch.zeros(4)), "sent early in each step"
    sends: Any = EarlySends()
    sends.early_update = EarlyUpdate(torch.optim.SGD([param]), {unit: [param]})  # pyright: ignore
    gathers = SimpleNamespace(cancel_early_sends=lambda: sends.forget())
    for step in range(1, num_skipped + 1):
        sends.units[unit], sends._sends[unit] = None, SimpleNamespace(is_outdated=False)
        scheduler: Any = SimpleNamespace(num_begun=step, early_sends=sends, gathers=gathers)
        StepScheduler.skip_update(scheduler)
        assert not sends.units
    assert sends.early_update.may_send(unit, num_skipped + 1) == (num_skipped < 3)


def test_a_gradient_that_comes_after_a_unit_was_sent_counts():
    assert run_ranks(add_a_gradient_late, 2, True) == run_ranks(add_a_gradient_late, 2, None)
