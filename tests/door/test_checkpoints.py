# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of unwrapped modules, from a plain loop to a plain loop, with stock at either end."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model

from tests.door.core_loop import Loop, Steps
from tests.door.test_core_loop import install
from tests.support.world import on_ranks

SAVED, STOP = 2, 4
OPTIONS: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16, "is_distributed": True}]


def cross(folder: Path, options: dict) -> tuple[dict[str, Steps], list]:
    """The steps after a checkpoint, by what saved and what loads it."""
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    steps: dict[str, Steps] = {}
    loop = Loop(**options).build()
    loop.train(0, SAVED)
    loop.save(folder / "stock")
    steps["stock goes on"] = loop.train(SAVED, STOP)
    install()
    loop = Loop(**options).build()
    loop.train(0, SAVED)
    loop.save(folder / "ours")
    steps["ours goes on"] = loop.train(SAVED, STOP)
    for name in ("stock", "ours"):
        loop = Loop(**options).build()
        keys = loop.load(folder / name)
        steps[f"ours loads {name}"] = loop.train(SAVED, STOP)
    return steps, keys


def resume_with_stock(folder: Path, options: dict) -> Steps:
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    loop = Loop(**options).build()
    loop.load(folder)
    return loop.train(SAVED, STOP)


def check_crossing(folder: Path, options: dict) -> None:
    for steps, keys in on_ranks(cross, 2, folder, options):
        expected = steps.pop("stock goes on")
        for name, found in steps.items():
            assert found == [pytest.approx(step, rel=1e-6) for step in expected], name
        for missing, unexpected in keys:
            assert list(missing) == list(unexpected) == []
    for steps in on_ranks(resume_with_stock, 2, folder / "ours", options):
        assert steps == [pytest.approx(step, rel=1e-6) for step in expected]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_a_checkpoint_is_resumed_by_stock_and_by_asynchzp_whoever_saved_it(
    tmp_path: Path, options: dict
):
    check_crossing(tmp_path, options)


def save_a_part(folder: Path) -> tuple[Steps, Steps, set[str], set[str]]:
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    install()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "trained": ".linear_proj."}
    loop = Loop(**options).build()
    loop.train(0, SAVED)
    loop.save(folder)
    went_on = loop.train(SAVED, STOP)
    loop = Loop(**options).build()
    ((missing, _),) = loop.load(folder)
    names = [name for name, _ in loop.modules[0].module.named_parameters()]
    resumed = loop.train(SAVED, STOP)
    return went_on, resumed, set(missing), {n for n in names if ".linear_proj." not in n}


def test_a_framework_that_keeps_adapters_by_name_saves_and_resumes_them(tmp_path: Path):
    first, second = on_ranks(save_a_part, 2, tmp_path)
    for went_on, resumed, *_ in (first, second):
        assert resumed == went_on
    (*_, missing, left_out), (*_, others_missing, _) = first, second  # each rank's shards
    assert missing | others_missing == left_out != set()


def save_frozen_layers(folder: Path) -> tuple[Steps, Steps]:
    """Save a model of which a layer is frozen, and which gives an entry under two keys."""
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    install()

    def new_loop() -> Loop:
        loop = Loop(dtype=torch.bfloat16, num_layers=3, frozen=".layers.1.")
        loop.initialize()
        loop.build_modules()
        model: Any = unwrap_model(loop.modules[0])
        describe = model.sharded_state_dict

        def describe_twice(*args: Any, **options: Any) -> dict[str, Any]:
            state = describe(*args, **options)
            return state | {"again": state["output_layer.weight"]}

        model.sharded_state_dict = describe_twice
        loop.wrap()
        loop.make_optimizer()
        return loop

    loop = new_loop()
    loop.train(0, SAVED)
    loop.save(folder)
    went_on = loop.train(SAVED, STOP)
    loop = new_loop()
    loop.load(folder)
    return went_on, loop.train(SAVED, STOP)


def test_frozen_layers_and_an_entry_under_two_keys_are_saved_and_resumed(tmp_path: Path):
    for went_on, resumed in on_ranks(save_frozen_layers, 2, tmp_path):
        assert resumed == went_on


class MegatronCheckpointManager:
    """What verl has under this name: it makes metadata for a state, and again for the file."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def _build_sharded_state_dict_metadata(self) -> dict[str, Any]:
        return {"distrib_optim_sharding_type": "dp_reshardable"}

    def save(self, loop: Loop, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        state = loop.state(False, self._build_sharded_state_dict_metadata())
        metadata = self._build_sharded_state_dict_metadata()
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)


def save_as_verl(folder: Path) -> tuple[Steps, Steps, dict]:
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    module = ModuleType("verl.utils.checkpoint.megatron_checkpoint_manager")
    module.MegatronCheckpointManager = MegatronCheckpointManager  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[module.__name__] = module
    install()
    loop = Loop(dtype=torch.bfloat16).build()
    loop.train(0, SAVED)
    MegatronCheckpointManager(loop.optimizer).save(loop, folder)
    went_on = loop.train(SAVED, STOP)
    loop = Loop(dtype=torch.bfloat16).build()
    loop.load(folder)
    others = MegatronCheckpointManager(optimizer=None)._build_sharded_state_dict_metadata()
    return went_on, loop.train(SAVED, STOP), others


def test_a_framework_that_states_the_form_of_the_optimizer_twice_can_read_its_checkpoint(
    tmp_path: Path,
):
    for went_on, resumed, others in on_ranks(save_as_verl, 2, tmp_path):
        assert resumed == went_on
        assert others == {"distrib_optim_sharding_type": "dp_reshardable"}  # stock's is as it was


def resume_in_other_sizes(folder: Path, options: dict) -> tuple[Steps, Steps]:
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    install((1, 2, 4))
    loop = Loop(**options).build()
    loop.train(0, SAVED)
    request = loop.save(folder, is_async=True)
    went_on = loop.train(SAVED, STOP)  # changes what the request still has to write
    request.execute_sync()
    loop = Loop(**options).build()
    loop.load(folder)
    return went_on, loop.train(SAVED, STOP)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_an_asynchronous_save_has_the_values_of_its_step(tmp_path: Path, options: dict):
    for went_on, resumed in on_ranks(resume_in_other_sizes, 4, tmp_path, options):
        assert resumed == went_on
