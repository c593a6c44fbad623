# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of Megatron's layers in MXFP8 that travel as codes of rows and of columns, on the
emulated device: the bits of gathers in bf16, in every loss, norm and main parameter."""

import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.sharding import topology
from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import Steps, listening, on_device, run_pretrain
from tests.device.test_low_precision_bytes import widened
from tests.device.test_megatron import INTERLEAVED
from tests.device.test_megatron_graphs import HYBRID, whole_and_resumed
from tests.device.test_transformer_engine import (
    BASE,
    BLACKWELL,
    CODES,
    FEWER,
    LATE,
    ON_TWO,
    RECIPES,
    SHARED,
    TENSOR,
    codes_of,
)

pytestmark = pytest.mark.slow

LINE = [*BASE, *FEWER, "--num-layers", "3", "--train-iters", "3"]
LINE += ["--lr", "1e-6", "--min-lr", "1e-7"]  # small weights stay small
EXPERTS = ON_TWO.split()


class Run(NamedTuple):
    """params: of each unit, a checksum of what this rank's optimizer holds; gathered: bytes that
    this rank handed to gathers in the third step: those before it differ from their last one."""

    steps: Steps
    params: list[int]
    validation_loss: float | None
    gathered: int


def checksums(model_chunks: list, optimizer: Any) -> list[int]:
    units = [unit for chunk in model_chunks for unit in chunk.units]
    return [zlib.crc32(unit.main_param.storage.cpu().numpy().tobytes()) for unit in units]


def train(line: Sequence[str], sleeps: bool = False, longest_axis: int = 64) -> Run:
    """sleeps: before each step; longest_axis: in ranks, before it is cut."""
    from megatron_asynchzp.engine.comm import collectives

    begun, built, nbytes, gather = list[int](), [], [0], collectives.all_gather_flat

    def begin_step() -> None:
        begun.append(len(begun))
        if sleeps:
            built[-1][1].sleep(2)
            built[-1][1].wake()

    def counted_gather(full: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
        nbytes[0] += shard.nbytes * (len(begun) > 2)
        return gather(full, shard, **options)

    with (
        mock.patch.object(topology, "LONGEST_AXIS", longest_axis),
        mock.patch.object(collectives, "all_gather_flat", counted_gather),
        listening(begin_step, lambda _: None, setup_model_and_optimizer=built.append),
        on_device(uses_te=True),
    ):
        record = run_pretrain(list(line), inspect=checksums, prepare=widened)
    return Run(record.losses_and_norms, record.inspected, record.validation_loss, nbytes[0])


class Coded(NamedTuple):
    """A run with codes. share: of bf16's bytes, at most; the layer at the turn comes in bf16."""

    share: float = 0.85
    flags: Sequence[str] = ()
    sleeps: bool = False


class Form(NamedTuple):
    """flags: of all its runs."""

    flags: Sequence[str]
    ranks: int = 2
    sizes: Sequence[int] = (2, 2, 2)
    coded: Sequence[Coded] = (Coded(),)
    longest_axis: int = 64
    laws: Sequence[Delays] = (Delays("uniform", 1),)
    recipe: str = "mxfp8"  # or NVFP4 in blocks of 16 elements of a row or a column

    @property
    def line(self) -> list[str]:
        return [*LINE, *RECIPES[self.recipe], *self.flags, *size_flags(self.sizes)]


def plain_and_coded(form: Form) -> list[Run]:
    """A run with gathers in bf16, and each with codes under each law."""
    from scripts.testbed.device import inside

    line, axis, codes = form.line, form.longest_axis, codes_of(form.recipe)
    runs = [train(line, longest_axis=axis)]
    for law, coded in product(form.laws, form.coded):
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        runs.append(train([*line, *codes, *coded.flags], coded.sleeps, axis))
    return runs


def compare(worlds: DeviceWorlds, form: Form) -> None:
    is_tensor = "--tensor-model-parallel-size" in form.flags
    env = BLACKWELL | {"NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1"}
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_tensor else {}
    for plain, *runs in worlds.run(plain_and_coded, form.ranks, form, timeout_s=850, env=env):
        assert len({loss for loss, _ in plain.steps}) in (1, 3)  # a stage without a loss has None
        print(plain, [run.gathered / plain.gathered for run in runs])
        for run, (_, coded) in zip(runs, product(form.laws, form.coded), strict=True):
            assert run[:3] == plain[:3], coded
            assert run.gathered <= coded.share * plain.gathered, coded


def kept(gib: str) -> Sequence[str]:
    return "--asynchzp-keep-params-gb", gib


# fmt: off
FORMS = {
    "evaluation": Form(["--eval-iters", "2", "--eval-interval", "2"], coded=[
        Coded(), Coded(1.0, kept("0.0008")), Coded(1.0, kept("0.1")), Coded(0.9, sleeps=True)]),
    "NVFP4 by rows and columns": Form([], coded=[Coded(0.7)], recipe="nvfp4"),
    "experts of two ranks": Form(EXPERTS, coded=[Coded(0.9)]),
    "overlapped experts": Form([*LATE.split(), *SHARED.split(), "--clip-grad", "1000"], coded=[
        Coded(1.0)], laws=[Delays("uniform", 1), Delays("slow-rank", 2)]),
    "sharded experts": Form(EXPERTS, 4, coded=[Coded(1.0)]),
    # Sides are multiples of 32: 2 x 256 + 2 x 16 + 32 rows.
    "Mamba": Form([*HYBRID, "--num-layers", "5", "--mamba-head-dim", "8",
                   "--mamba-num-heads", "32"], coded=[Coded(0.95)]),
    "tensor": Form(TENSOR, 4, coded=[Coded(0.9)]),
    "interleaved pipeline": Form(INTERLEAVED, 4, coded=[Coded(1.0)]),
    "early update": Form(["--clip-grad", "6.1"], 4, (2, 2, 4), [
        Coded(), Coded(flags=["--asynchzp-early-update", "on"])]),
    "4 ranks": Form([], 4, (4, 2, 4)),
    "cut axis": Form([], 4, (4, 4, 4), longest_axis=2),
}
# fmt: on


@pytest.mark.parametrize("name", FORMS)
def test_other_runs_have_the_bits_of_gathers_in_bf16(te_worlds: DeviceWorlds, name: str):
    compare(te_worlds, FORMS[name])


def test_a_run_goes_on_in_the_middle_with_the_bits_of_gathers_in_bf16(
    te_worlds: DeviceWorlds, tmp_path: Path
):
    line = Form([]).line
    for plain, saved, resumed in te_worlds.run(
        whole_and_resumed, 2, train, line, CODES, str(tmp_path), 1, 1, timeout_s=590, env=BLACKWELL
    ):
        assert saved[:3] == plain[:3] and saved.gathered < plain.gathered
        assert resumed.steps == plain.steps[1:] and resumed.params == plain.params


@pytest.mark.parametrize("law", [law for law in LAWS if law != "none"])
def test_ten_seeds_of_each_law_have_the_bits_of_gathers_in_bf16(te_worlds: DeviceWorlds, law: str):
    laws = [Delays(law, seed) for seed in range(10)]
    line = ["--global-batch-size", "2", "--num-layers", "2"]
    compare(te_worlds, Form(line, coded=[Coded(0.95)], laws=laws))
