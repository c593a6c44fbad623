# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where the values of a sharded model come from, and what it tells of its steps: a model on the
meta device, main parameters that are more exact than the model, meshes."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_asynchzp import ConfigurationError, ShardSizes, shard
from megatron_asynchzp.engine.zero.construction import Construction
from scripts.testbed.ranks import run_ranks
from tests.support import loops
from tests.support.loops import SIZES, SIZES_OF_4, new_adamw, unclipped, unclipped_step
from tests.support.selection import slow_unless


class Scaled(nn.Module):
    """A layer with a parameter and a buffer of its own, and a tied one."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.register_buffer("shift", torch.empty(width))
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)
        self.shift.fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)) * self.scale + self.shift)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(Scaled() for _ in range(3))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].linear.weight = self.layers[2].linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch] of words."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def plain() -> Model:
    """As FSDP2's users start one: allocated, then each module resets its own."""
    model = Model()
    torch.manual_seed(3)
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(11, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def of_words(model: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
    return [model(batch(step, rank)).float().square().mean()]


LOOP = loops.Loop(plain, of_words, unclipped_step, clip=unclipped)


def check_meta(all_sizes) -> None:
    expected = LOOP.plainly()
    for sizes in all_sizes:
        torch.manual_seed(3)
        model = on_meta()
        with patch.object(Construction, "_unshard") as gather_whole:
            sharded = LOOP.sharded(sizes, model, device="cpu")
        assert not gather_whole.called
        with sharded:
            assert model.head.weight is model.embedding.weight
            assert LOOP.train(sharded) == expected, sizes


@pytest.mark.parametrize(
    "ranks, all_sizes", [(2, SIZES), slow_unless(False, 4, SIZES_OF_4)], ids=["2", "4"]
)
@pytest.mark.habit("a model on the meta device")
def test_a_model_on_the_meta_device_trains_as_one_that_was_allocated_and_reset(ranks, all_sizes):
    run_ranks(check_meta, ranks, all_sizes)


class Silent(nn.Module):
    """Without reset_parameters."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(3))


class Forgetful(Silent):
    def reset_parameters(self) -> None:
        pass


class SilentBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)


def check_refused_meta() -> None:
    for extra, text in (
        (Silent, r"extra \(a Silent\) is on the meta device.*table"),
        (SilentBuffer, r"extra \(a SilentBuffer\) is on the meta device.*frequencies"),
        (Forgetful, r"extra.table: the reset_parameters\(\) of Forgetful leaves it"),
    ):
        model = on_meta()
        with torch.device("meta"):
            model.extra = extra()
        with pytest.raises(ConfigurationError, match=text):
            shard(model, model.layers, ShardSizes(2, 2, 2), new_adamw, device="cpu")
    half = on_meta()
    half.head = nn.Linear(16, 11)
    with pytest.raises(ConfigurationError, match="is on meta and .* is on cpu; move the whole"):
        shard(half, half.layers, ShardSizes(2, 2, 2), new_adamw)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ConfigurationError, match="other values on rank 1 than on rank 0"):
        other = on_meta()
        shard(other, other.layers, ShardSizes(2, 2, 2), new_adamw, device="cpu")
    with pytest.raises(ConfigurationError, match="param_dtype has no fp32 values"):
        other = on_meta()
        new = ShardSizes(2, 2, 2)
        shard(other, other.layers, new, new_adamw, param_dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"param_dtype is torch.float32; it is to be"):
        other = plain()
        shard(other, other.layers, ShardSizes(2, 2, 2), new_adamw, param_dtype=torch.float32)
    with pytest.raises(ConfigurationError, match="param_dtype is for models whose"):
        other = plain().bfloat16()
        shard(other, other.layers, ShardSizes(2, 2, 2), new_adamw, param_dtype=torch.bfloat16)
    placed = plain()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = distribute_tensor(placed.layers[1].linear.weight.detach(), mesh, [Shard(0)])
    placed.layers[1].linear.weight = nn.Parameter(weight)
    with pytest.raises(ConfigurationError, match=r"DTensor \(mesh dimensions tp\).*Megatron's"):
        shard(placed, placed.layers, ShardSizes(2, 2, 2), new_adamw)


def without_buffers() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(16, 16) for _ in range(3)]
    return nn.Sequential(nn.Embedding(11, 16), *layers, nn.LayerNorm(16), nn.Linear(16, 11))


def check_exact_main_params(all_sizes) -> None:
    for sizes in all_sizes:
        exact = dict(without_buffers().named_parameters())
        model = without_buffers()
        layers = [model[1], model[2], model[3]]
        with shard(
            model, layers, ShardSizes(*sizes), new_adamw, param_dtype=torch.bfloat16
        ) as sharded:
            main = {part.name: (part.held, part.values) for part in sharded._trained}
            for name, (held, values) in main.items():
                whole = exact[name].detach().reshape(-1)
                assert torch.equal(values, whole[held.start : held.stop]), name
            for name, value in sharded.full_params():
                assert torch.equal(value, exact[name].bfloat16()), name
            assert model(batch(0, 0)).dtype == torch.bfloat16
            assert layers[0](torch.randn(2, 16)).dtype == torch.bfloat16  # its inputs are cast
            # A rate that bf16 alone would round away: the exact values move by it.
            for group in sharded.optimizer.param_groups:
                group["lr"] = 1e-5
            LOOP.train(sharded, range(1))
            for name, (held, values) in main.items():
                moved = (values - exact[name].detach().reshape(-1)[held.start : held.stop]).abs()
                if values.numel():
                    assert 0 < moved.max() < 3e-5, name


def check_meshes() -> None:
    expected = LOOP.plainly()
    for shape, names, sizes in (
        ((4,), ("dp",), (4, 4, 4)),
        ((2, 2), ("replicate", "shard"), (2, 2, 2)),
    ):
        model = plain()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with shard(model, model.layers, mesh, new_adamw) as sharded:
            groups = sharded.runtime.units[0].groups
            assert groups.topology.sizes == ShardSizes(*sizes)
            assert LOOP.train(sharded) == expected
    model = plain()
    with pytest.raises(ConfigurationError, match="sizes is a mesh of 3 dimensions"):
        shard(model, model.layers, init_device_mesh("cpu", (1, 2, 2)), new_adamw)


def check_reports(folder: Path) -> None:
    model = plain()
    with shard(model, model.layers, ShardSizes(2, 2, 2), new_adamw) as sharded:
        LOOP.train(sharded)
        sharded.take_report()
        LOOP.train(sharded, range(2))
        report = sharded.take_report()
        units = len(sharded.runtime.units)
        assert report.reductions_per_step == units <= report.gathers_per_step <= 2 * units
        assert report.exposed_ms is not None and 0 <= report.overlap_percent <= 100
        file = folder / f"{dist.get_rank()}.json"
        with sharded.trace(file):
            LOOP.train(sharded, range(1))
    events = json.loads(file.read_text())["traceEvents"]
    assert {"gather", "reduce"} <= {event.get("cat", event.get("name")) for event in events} | {
        str(event.get("args", {}).get("name")) for event in events
    }


def check_two(folder: Path) -> None:
    check_refused_meta()
    check_exact_main_params(SIZES)
    check_reports(folder)


@pytest.mark.habit(
    "bf16 computation of a model in fp32",
    "tensor parallelism by DTensor parameters",
    "what communication costs, and a trace",
)
def test_main_parameters_stay_exact_and_steps_are_reported(tmp_path):
    run_ranks(check_two, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.habit("a `DeviceMesh` of one or two dimensions as `sizes`")
def test_meshes_become_sizes_on_four_ranks():
    run_ranks(check_meshes, 4)
