# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A Megatron run that sleeps between its steps: the same bits, nothing of the engine left in
memory, and a checkpoint saved asleep is one saved awake."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_asynchzp.engine.at_rest.sleep import HostCopy
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS, TENSOR_PARALLEL, size_flags
from scripts.testbed.megatron_runs import Steps, gpt_args, listening, run_pretrain
from tests.support.world import on_ranks

# fmt: off
INTERLEAVED = ("--num-layers", "4", "--pipeline-model-parallel-size", "2",
               "--num-layers-per-virtual-pipeline-stage", "1")
LAYOUTS = {
    "data": (4, (), (1, 2, 4)),
    "tensor": (4, tuple(TENSOR_PARALLEL), (2, 2, 2)),
    "interleaved": (4, INTERLEAVED, (2, 2, 2)),
    "experts": (2, (*MIXTURE_OF_EXPERTS, "--expert-model-parallel-size", "2"), (1, 2, 2)),
    "muon": (2, ("--optimizer", "muon", "--untie-embeddings-and-output-weights"), (1, 2, 2)),
}
# fmt: on
# Megatron has no gradient scaler for Muon.
LAYOUTS_AND_DTYPES = [*product(LAYOUTS, ["--bf16", "--fp16", ""])]
LAYOUTS_AND_DTYPES.remove(("muon", "--fp16"))


class Run:
    """A run whose steps begin with `begin(step, chunks, optimizer, scheduler)`."""

    def __init__(self, begin: Callable[[int, Any, Any, Any], None]):
        self._begin, self._built, self._step = begin, (), 0

    def steps(self, argv: list[str]) -> Steps:
        with listening(self._begin_step, lambda _: None, setup_model_and_optimizer=self._set_up):
            record = run_pretrain(argv)
        return record.losses_and_norms

    def _set_up(self, built: tuple) -> None:
        self._built = built

    def _begin_step(self) -> None:
        self._step += 1
        self._begin(self._step, *self._built)


def states_of(chunks: list) -> list[torch.Tensor]:
    units = [unit for chunk in chunks for unit in chunk.units]
    return [one for unit in units for one in (unit.model_param.storage, *unit.states())]


def sleeping_run(argv: list[str]) -> tuple[Steps, Steps, list[tuple[int, int, int]]]:
    """Steps without and with a sleep before each; of each sleep its level, the bytes that are left
    of the engine, and the number of copies."""
    seen = []

    def sleep(step: int, chunks: Any, optimizer: Any, _: Any) -> None:
        level, packs = 1 + step % 2, []
        original = HostCopy._fetch

        def counted(self: HostCopy, pack: list) -> Any:
            packs.append(pack)
            return original(self, pack)

        HostCopy._fetch = counted
        try:
            optimizer.sleep(level)
        finally:
            HostCopy._fetch = original
        left = sum(one.untyped_storage().nbytes() for one in states_of(chunks))
        for runtime in (chunk.runtime for chunk in chunks):
            arenas = runtime.gathers.arena, runtime.reductions.arena
            assert [one for arena in arenas for one in arena.memory] == []
        seen.append((level, left, len(packs)))
        with pytest.raises(ConfigurationError, match="asleep"):
            chunks[0].zero_grad_buffer()
        with pytest.raises(ConfigurationError, match="asleep"):
            optimizer.sleep()
        optimizer.wake()
        with pytest.raises(ConfigurationError, match="without a sleep"):
            optimizer.wake()

    awake = Run(lambda *_: None).steps(argv)
    return awake, Run(sleep).steps(argv), seen


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", LAYOUTS_AND_DTYPES)
def test_steps_between_sleeps_have_the_bits_of_those_without(name: str, dtype: str):
    world_size, flags, sizes = LAYOUTS[name]
    argv = gpt_args("--train-iters", "6", *flags, *size_flags(sizes), *filter(None, [dtype]))
    for awake, sleeping, seen in on_ranks(sleeping_run, world_size, argv):
        assert sleeping == awake and len(awake) == 6
        assert all(copies <= 10 for _, _, copies in seen)
        for level, left, _ in seen:
            assert (left == 0) == (level == 2)


def saved_asleep(argv: list[str], folder: str) -> tuple[Steps, Steps, Steps]:
    """A whole run; one that is saved asleep before its fourth step; one that goes on from there."""
    from megatron.training.checkpointing import save_checkpoint

    def save(step: int, chunks: Any, optimizer: Any, scheduler: Any) -> None:
        if step == 4:
            optimizer.sleep(2)
            save_checkpoint(3, chunks, optimizer, scheduler, 0)
            with pytest.raises(ConfigurationError, match="asleep"):
                optimizer.sharded_state_dict({}, is_loading=True)
            optimizer.wake()

    store = ["--ckpt-format", "torch_dist"]
    nothing = Run(lambda *_: None)
    whole = nothing.steps(argv)
    saving = Run(save).steps([*argv, *store, "--save", folder, "--save-interval", "100"])
    resumed = nothing.steps([*argv, *store, "--load", folder, "--ckpt-step", "3"])
    return whole, saving, resumed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["--bf16", ""])
@pytest.mark.parametrize("name", ["data", "tensor", "interleaved"])
def test_a_checkpoint_saved_asleep_goes_on_bit_for_bit(name: str, dtype: str, tmp_path: Path):
    world_size, flags, sizes = LAYOUTS[name]
    argv = gpt_args("--train-iters", "6", *flags, *size_flags(sizes), *filter(None, [dtype]))
    for whole, saving, resumed in on_ranks(saved_asleep, world_size, argv, str(tmp_path)):
        assert saving == whole
        assert resumed == whole[3:]
