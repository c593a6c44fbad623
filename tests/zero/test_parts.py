# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A model that is run in parts, the backward of one micro-batch beside the forward of the next, has
the gradients of its calls, in every bit."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.calls import ManualRegion
from scripts.testbed.ranks import run_ranks
from tests.support.engine import EngineTrainer, build_toy, nested_sizes, on_submit
from tests.support.toy_models import ToyLM, toy_batch

MICRO_BATCHES, STEPS = 3, 2
SCHEDULES = (ScheduleConfig("threaded"), ScheduleConfig("main-thread", 2), ScheduleConfig("inline"))


@dataclass
class Stage:
    """What `run` computes of its input. late: weights whose gradients come after all of backward's,
    as Transformer Engine's delayed ones.
    places: of these gradients, where a graph that computes them was captured to leave them.
    """

    part: ManualRegion
    run: Callable[[torch.Tensor], torch.Tensor]
    late: list[nn.Parameter] = field(default_factory=list)
    places: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = given.detach().requires_grad_(given.is_floating_point())
        with self.part.forward():
            return given, self.run(given)

    def backward(self, held: tuple[torch.Tensor, torch.Tensor], grad: torch.Tensor | None):
        given, made = held
        with self.part.backward():
            made.backward(grad)
        late = [(param, param.grad) for param in self.late]
        for param in self.late:
            param.grad = None
        return given.grad, late

    def complete(self, late) -> None:
        for param, grad in late:
            if param in self.places:
                self.places[param].copy_(grad)
            else:
                param.grad = grad
        self.part.complete()


Places = dict[nn.Parameter, torch.Tensor]


def stages_of(model: ToyLM, runtime: HZPRuntime, is_late: bool, places: Places) -> list[Stage]:
    """Embedding; norm and first linear layer of each block, and the second one; output and loss."""
    unit_of = {param: unit for unit in runtime.units for param in unit.params}
    seen: set = set()

    def part(*modules: nn.Module) -> ManualRegion:
        params = [param for module in modules for param in module.parameters()]
        units = list(dict.fromkeys(unit_of[param] for param in params))
        completes = [unit for unit in units if unit not in seen]
        seen.update(units)
        return runtime.manual_region(units, completes)

    def up(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, nn.functional.gelu(block.up(block.norm(x)))), -1)

    def down(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        width = block.down.out_features
        return x[..., :width] + block.down(x[..., width:])

    stages = [Stage(part(model.embedding), model.embedding)]
    for block in model.blocks:
        for run, weight in ((up, block.up.weight), (down, block.down.weight)):
            late = [weight] if is_late else []
            stages.append(Stage(part(block), partial(run, block), late, places))
    last = part(model.norm, model.embedding if model.is_tied else model.output)
    tied = model.embedding.weight if model.is_tied else None
    return [*stages, Stage(last, lambda x: model.output(model.norm(x), tied))]


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def places_of_graphs(trainer: EngineTrainer) -> Places:
    """Where graphs of the second linear layers leave the gradients of their weights."""
    for unit in trainer.runtime.units:
        unit.is_seated = "blocks" in unit.name
    late = {block.down.weight for block in trainer.model.blocks}
    with trainer.runtime.rehearsing(late):
        return {weight: weight.main_grad for weight in late}


def run_in_parts(trainer: EngineTrainer, step: int, is_late: bool, places: Places) -> None:
    """Forward and backward of a step, stage by stage."""
    runtime, made = trainer.runtime, []
    stages = stages_of(trainer.model, runtime, is_late, places)
    runtime.zero_grads()

    def forward(batch: torch.Tensor):
        given = batch[:, :-1]
        for stage in stages:
            made[-1].append(stage.forward(given))
            given = made[-1][-1][1]
            yield

    def backward(batch: torch.Tensor):
        held = made.pop(0)
        logits = held[-1][1].detach().requires_grad_()
        (loss_of(logits, batch) / MICRO_BATCHES).backward()
        grad, waiting = logits.grad, []
        for stage in reversed(stages):
            grad, late = stage.backward(held.pop(), grad)
            for one, kept in waiting:  # the weights of the stage before, beside this one
                one.complete(kept)
            waiting = [(stage, late)]
            yield
        for one, kept in waiting:
            one.complete(kept)

    batches = [toy_batch(step, index, dist.get_rank()) for index in range(MICRO_BATCHES)]
    made.append([])
    for _ in forward(batches[0]):
        pass
    with runtime.no_sync():
        for index in range(1, MICRO_BATCHES):
            made.append([])
            runs = [backward(batches[index - 1]), forward(batches[index])]
            while runs:
                runs = [run for run in runs if next(run, run) is not run]
    for _ in backward(batches[-1]):
        pass


def grads_of(sizes, schedule: ScheduleConfig, is_tied: bool, way: str):
    """All gradient shards of each step, and how often each unit was reduced."""
    trainer = EngineTrainer(build_toy(is_tied=is_tied), sizes, schedule=schedule)
    runtime, reduced, seen = trainer.runtime, Counter(), []
    on_submit(runtime.driver, lambda task: reduced.update([(task.lane, task.unit)]))
    places = places_of_graphs(trainer) if way == "late in a graph" else {}
    for step in range(STEPS):
        if way == "called":
            trainer.backward(step, MICRO_BATCHES)
        else:
            run_in_parts(trainer, step, way.startswith("late"), places)
        runtime.sync_grads()
        seen += [unit.main_grad.view(unit.optim_range).clone() for unit in runtime.units]
        trainer.update()
    assert not runtime.gathers.warned
    trainer.runtime.close()
    return seen, {what: n for (lane, what), n in reduced.items() if lane == "reduce"}


def compare() -> int:
    for index, sizes in enumerate(nested_sizes(2)):
        schedule, is_tied = SCHEDULES[index % len(SCHEDULES)], index in (1, 2)
        called, _ = grads_of(sizes, schedule, is_tied, "called")
        way = ("late", "in time", "late in a graph")[index % 3]
        grads, reduced = grads_of(sizes, schedule, is_tied, way)
        # With G = 1 both gradients of a tied weight are added to the sum of the micro-batches.
        rtol = 1e-4 if is_tied and sizes[1] == 1 else 0
        for mine, expected in zip(grads, called, strict=True):
            torch.testing.assert_close(mine, expected, rtol=rtol, atol=rtol / 10)
        assert set(reduced.values()) == (set() if sizes[1] == 1 else {STEPS * MICRO_BATCHES}), (
            reduced
        )
    return index + 1


def test_a_model_in_parts_has_the_gradients_of_its_calls_in_every_bit():
    assert all(compared >= 4 for compared in run_ranks(compare, 2))


def call_what_is_not_named() -> None:
    trainer = EngineTrainer(build_toy(), (2, 2, 2))
    trainer.runtime.zero_grads()
    with pytest.raises(
        RuntimeError, match="blocks.1 is called in a manual region that does not name it"
    ):
        with trainer.runtime.manual_region(trainer.runtime.units[:1]).forward():
            trainer.model.blocks[1](torch.zeros(1, 1, 16))
    trainer.runtime.close()


def compute_again() -> None:
    trainer = EngineTrainer(build_toy(), (2, 2, 2))
    first, second = (block.norm.weight for block in trainer.model.blocks[:2])
    unit_of = {param: unit for unit in trainer.runtime.units for param in unit.params}
    part = trainer.runtime.manual_region([unit_of[second]], recomputed=[unit_of[first]])

    def are_gathered() -> list[bool]:
        return [bool(weight.isfinite().all()) for weight in (first, second)]

    trainer.runtime.zero_grads()
    with part.forward():
        assert are_gathered() == [False, True]
    assert not trainer.runtime.is_in_region
    with part.backward():
        assert are_gathered() == [True, True]
    assert are_gathered() == [False, False] and not trainer.runtime.is_in_region
    trainer.runtime.close()


def ask_for_a_part_with_fused_gradients() -> None:
    trainer = EngineTrainer(build_toy(), (2, 2, 2), fuses_grads=True)
    with pytest.raises(RuntimeError, match="cannot run in manual regions"):
        trainer.runtime.manual_region(trainer.runtime.units)
    trainer.runtime.close()


def refuse_and_compute_again() -> None:
    call_what_is_not_named()
    ask_for_a_part_with_fused_gradients()
    compute_again()


def test_a_part_has_what_its_backward_computes_again_and_refuses_what_it_cannot_run():
    run_ranks(refuse_and_compute_again, 2)
