# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Weights that travel as FP8 codes: layers that compute on that grid make the same of them, bit for
bit, and half of the bytes travel."""

from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_asynchzp.engine.comm import low_precision_gather
from megatron_asynchzp.engine.comm.collectives import run_steps
from megatron_asynchzp.engine.comm.low_precision_gather import Fp8Gather, WeightGrid
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.layout import FlatLayout
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner.program import GATHER
from megatron_asynchzp.planner.traffic import Group, unit_collectives
from scripts.testbed.ranks import run_ranks
from scripts.testbed.te.formats import Coded, Grid, amax_of_blocks, decode, encode, spread
from tests.support.engine import EngineTrainer, build_toy, shard_groups
from tests.support.held_network import replace_default_group
from tests.support.selection import slow_unless

E4M3 = torch.float8_e4m3fn


GRIDS = [
    WeightGrid(),
    WeightGrid(is_power=True),
    WeightGrid(epsilon=1e-3),
    WeightGrid(is_power=True, side=16),
    WeightGrid(side=16),
]


def on_grid(weight: torch.Tensor, of: WeightGrid = GRIDS[0]) -> tuple[Coded, torch.Tensor]:
    """What a layer makes of its weight: codes with a scale, and the values, fp32."""
    grid = Grid(of.side, of.side, "power" if of.is_power else "fp32")
    coded = encode(weight, grid, E4M3, of.epsilon)
    return coded, decode(coded, grid, E4M3)


# ---- what arrives

ODD = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-20, 3.0e38]


def random_weights(seed: int) -> tuple[list[torch.Tensor], list[int]]:
    """Parameters of any shape and size of values, now and then with an odd one, and which of them
    are coded."""
    made = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=made))

    weights = []
    for index in range(number(2, 8)):
        shape = (number(1, 70), number(1, 70)) if index % 3 == 0 else (number(1, 50),)
        size = 10.0 ** number(-20, 6)
        weights.append((torch.randn(shape, generator=made) * size).bfloat16())
        if (odd := number(0, 4 * len(ODD))) < len(ODD):
            weights[-1].view(-1)[number(0, weights[-1].numel())] = ODD[odd]
        elif odd == len(ODD):
            weights[-1].zero_()
    return weights, [index for index in range(len(weights)) if index % 3 == 0]


def check_what_arrives(sizes: tuple, seeds: range) -> float:
    """The least share of bf16's bytes that travelled."""
    groups, shares = shard_groups(sizes), []
    number = sizes[0]
    for seed in seeds:
        weights, coded = random_weights(seed)
        shapes = [(str(index), tuple(weight.shape)) for index, weight in enumerate(weights)]
        layout = FlatLayout.build(shapes, sizes[2])
        sent = torch.zeros(layout.padded_numel, dtype=torch.bfloat16)
        for piece, weight in zip(layout.slices, weights):
            sent[piece.range.start : piece.range.stop] = weight.view(-1)
        shard = groups.topology.shard_range(number, layout.padded_numel)
        own = sent[shard.start : shard.stop].clone()
        for grid in GRIDS:
            gather = Fp8Gather(layout, number, coded, grid, lambda: True)
            if not gather.is_shorter:
                continue
            shares.append(gather.message_nbytes / own.nbytes)
            arrived = torch.full_like(sent, torch.nan)
            steps = gather.steps(own, shard.start // shard.numel, arrived, groups.unshard)
            with mock.patch.object(
                low_precision_gather, "_MOST_AT_ONCE", 2 ** (20 if seed % 2 else 6)
            ):
                run_steps(steps)
            for index, (piece, weight) in enumerate(zip(layout.slices, weights)):
                found = arrived[piece.range.start : piece.range.stop].view(weight.shape)
                if index not in coded:
                    assert torch.equal(found.view(torch.int16), weight.view(torch.int16))
                elif not weight.isfinite().all():
                    blocks = Grid(grid.side, grid.side)
                    is_odd = ~amax_of_blocks(weight, blocks).isfinite()
                    assert found[spread(is_odd, blocks, weight.shape)].isnan().all()
                    assert found[~spread(is_odd, blocks, weight.shape)].isfinite().all()
                else:
                    (codes, values), (theirs, expected) = (
                        on_grid(one, grid) for one in (found, weight)
                    )
                    assert torch.equal(values, expected), (seed, index)
                    # By a power of two a scale may be twice as fine: the same values.
                    assert grid.is_power or torch.equal(codes.codes, theirs.codes)
    return min(shares)


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(2, (2, 2, 2)), slow_unless(False, 4, (4, 4, 4)), (4, (4, 4, 4, (2,)))]
)
def test_layers_make_the_same_codes_of_what_arrives_and_nothing_else_changes(ranks, sizes):
    shares = run_ranks(check_what_arrives, ranks, sizes, range(40))
    assert 0.5 <= min(shares) < 0.55


@pytest.mark.parametrize("side, columns", [(None, 9), (4, 9), (4, 30), (4, 70), (1, 101)])
def test_pieces_are_whole_rows_of_blocks_and_as_short_as_these_allow(monkeypatch, side, columns):
    most = 100
    monkeypatch.setattr(low_precision_gather, "_MOST_AT_ONCE", most)
    band = (side or 0) * columns
    for first, start, numel in product((0, 1, 170, 523), (0, 64), (1, 99, 100, 1000)):
        part = low_precision_gather._Fp8Part(
            WeightGrid(False, 0.0, side), (40, columns), slice(0, 1), first,
            slice(start, start + numel),
        )  # fmt: skip
        pieces = part.pieces()
        assert [piece.start for piece in pieces] == [start, *(p.stop for p in pieces[:-1])]
        assert pieces[-1].stop == start + numel
        assert all(0 < piece.stop - piece.start <= max(most, band) for piece in pieces)
        for piece in pieces[1:]:
            assert side is None or (first + piece.start - start) % band == 0


def test_the_planner_counts_the_bytes_of_a_layer_within_one_percent():
    shapes = [
        ("proj", (512, 512)),
        ("norm", (512,)),
        ("qkv", (1536, 512)),
        ("norm2", (512,)),
        ("fc1", (2048, 512)),
        ("bias", (2048,)),
        ("fc2", (512, 2048)),
    ]
    layout = FlatLayout.build(shapes, 4)
    coded = [index for index, (_, shape) in enumerate(shapes) if len(shape) == 2]
    gather = Fp8Gather(layout, 4, coded, WeightGrid(), lambda: True)
    in_codes = sum(shapes[index][1][0] * shapes[index][1][1] for index in coded)
    group = Group(4, ShardSizes(4, 4, 4))
    agreed, planned = unit_collectives(GATHER, layout.padded_numel, 2, group, in_codes)
    assert agreed.operation == "all-reduce"
    assert planned.numel * planned.itemsize == pytest.approx(4 * gather.message_nbytes, rel=0.01)
    assert planned.numel * planned.itemsize < 1.02 * layout.padded_numel


# ---- in training


class _InFP8(torch.autograd.Function):
    """Backward quantises the weight again, which is gathered for it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ on_grid(weight)[1].to(x.dtype).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        values = on_grid(weight)[1].to(x.dtype)
        return grad @ values, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Linear8(nn.Linear):
    def forward(self, x):
        return _InFP8.apply(x, self.weight) + self.bias


def trained(sizes: tuple, kind: str, in_codes: bool) -> tuple[list[float], dict, int]:
    """Losses of 3 steps of 2 micro-batches, the parameters after them, and the bytes that this rank
    handed to gathers."""
    network = replace_default_group()
    model = build_toy(torch.bfloat16, width=32)
    for block in model.blocks:
        block.up.__class__ = block.down.__class__ = Linear8
    schedule = ScheduleConfig(kind=kind, checks_order=False)
    trainer = EngineTrainer(model, sizes, schedule=schedule)
    state = SimpleNamespace(is_fp8=True)
    for unit in trainer.runtime.units if in_codes else ():
        names = [name for name in unit.param_names if "up.weight" in name or "down.weight" in name]
        unit.gather_in_fp8(names, WeightGrid(), lambda: state.is_fp8)
    network.take_journal()
    losses = [trainer.step(step, 2) for step in range(3)]
    trainer.runtime.settle()
    desc = "ASYNCHZP_GATHER"
    nbytes = 0
    for one in network.take_journal():
        if one.group.split()[0] == desc and one.kind == "all_gather":
            numel, dtype = one.carried.split(" x ")
            nbytes += int(numel) * getattr(torch, dtype).itemsize
    params = trainer.full_params()
    if in_codes:
        state.is_fp8 = False
        with pytest.raises(ConfigurationError, match="called outside FP8.*drop --fp8-param-gather"):
            trainer.backward(3, 1)
    trainer.runtime.close()
    return losses, params, nbytes


def check_training(sizes: tuple, kind: str) -> tuple[int, int]:
    losses, params, nbytes = trained(sizes, kind, in_codes=False)
    in_codes = trained(sizes, kind, in_codes=True)
    assert in_codes[0] == losses
    assert all(torch.equal(in_codes[1][name], value) for name, value in params.items())
    return in_codes[2], nbytes


@pytest.mark.parametrize(
    ("ranks", "sizes", "kind"),
    [
        (2, (2, 1, 2), "main-thread"),
        slow_unless(False, 2, (2, 2, 2), "inline"),
        slow_unless(False, 4, (2, 2, 4), "threaded"),
        slow_unless(False, 4, (4, 4, 4, (2,)), "threaded"),
    ],
)
def test_training_has_the_bits_of_gathers_in_bf16(ranks, sizes, kind):
    for coded, plain in run_ranks(check_training, ranks, sizes, kind):
        assert coded < plain
