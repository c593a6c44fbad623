# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes of one rank: the paper's formula at rest, units of a model, and what peaks consist of. That
they are the bytes of the engine's own units is in tests/mcore/test_planned.py."""

from dataclasses import replace
from itertools import product

import pytest

from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.memory import Activations, Memory, state_nbytes
from megatron_asynchzp.planner.model import (
    Attention,
    Batch,
    Experts,
    Layer,
    Mlp,
    Model,
    Parallel,
    chunk_layers,
    stage_units,
)

_DENSE, _MIXED = (
    Layer(Attention(8, 4, 16), Mlp(256, True)),
    Layer(Attention(8, 4, 16), Experts(8, 2, 64, True, shared_ffn=64)),
)
_MODEL = Model(128, 512, (_DENSE, _MIXED) * 6, is_tied=False)
_BATCH = Batch(1, 64, 8)


def test_at_rest_a_rank_holds_2n_over_p_4n_over_g_and_12n_over_o_bytes():
    for param, grad, optim in product((1, 2, 4), repeat=3):
        sizes = ShardSizes(param, grad, optim)
        held = sum(state_nbytes(960, 2, sizes).values())
        assert held == 2 * 960 / param + 4 * 960 / grad + 12 * 960 / optim
        assert sum(state_nbytes(960, 2, sizes, moments=4).values()) == held - 4 * 960 / optim
        fp32 = sum(state_nbytes(960, 4, sizes).values())
        assert fp32 == 4 * 960 / param + 4 * 960 / grad + 8 * 960 / optim


@pytest.mark.parametrize("virtual", [1, 3])
def test_stages_share_out_every_layer_once(virtual):
    whole = sum(unit.numel for unit in stage_units(_MODEL, Parallel(), _BATCH, 0))
    for pp in (1, 2, 4):
        parallel = Parallel(pp=pp, virtual=virtual)
        units = [stage_units(_MODEL, parallel, _BATCH, stage) for stage in range(pp)]
        assert sum(unit.numel for stage in units for unit in stage) == whole
        flops = sum(unit.flops for stage in units for unit in stage)
        assert flops == pytest.approx(sum(u.flops for u in stage_units(
            _MODEL, Parallel(), _BATCH, 0)))  # fmt: skip


def test_layers_that_no_equal_shares_divide_are_refused_unless_they_are_given():
    with pytest.raises(ValueError, match="12 layers on 5 model chunks"):
        chunk_layers(_MODEL, Parallel(pp=5), 0)
    given = Parallel(pp=2, stage_layers=(5, 7))
    assert [len(chunk_layers(_MODEL, given, stage)[0]) for stage in (0, 1)] == [5, 7]
    with pytest.raises(ValueError, match="are not 12 layers"):
        chunk_layers(_MODEL, replace(given, stage_layers=(5, 5)), 0)


def _memory(**rest) -> Memory:
    at_rest = {
        "model_param": 10.0,
        "main_grad": 20.0,
        "main_param": 20.0,
        "optimizer_moments": 40.0,
    }
    return Memory(at_rest, {"param_ring": 5.0, "grad_ring": 10.0}, 8.0, Activations(**rest))


def test_the_total_is_the_higher_of_the_start_and_of_the_two_peaks_of_a_step():
    small = {"kept": 1.0, "logits": 2.0, "working": 3.0, "whole_layer": 100.0}
    assert _memory(**small).total == 90 + 15 + 1 + 3
    assert _memory(**(small | {"logits": 7.0})).total == 90 + 15 + 1 + 7
    assert _memory(**(small | {"buffer": 4.0})).total == 90 + 15 + 1 + 3 + 4
    assert _memory(**(small | {"whole_layer": 6.0})).total == 90 + 15 + 1 + 3 + (8 - 6)
    start = 50 + 15 + 8  # moments come with the first update
    assert _memory(**small).start == start
    assert replace(_memory(**(small | {"whole_layer": 6.0})), own_grads=10.0).working == 3 + 4
    copied = replace(_memory(**small), copied_params=6.0, copied_grads=9.0)
    assert copied.total == 90 + 15 + 1 + 9
    assert replace(_memory(**small, kept_layer=5.0), copied_params=6.0, copied_grads=9.0).total == (
        90 + 15 + 1 + 6
    )
    assert replace(copied, copies_beside=True).total == 90 + 15 + 1 + 3 + 6 + 9
    unheld = replace(_memory(**small), at_rest={"model_param": 10.0, "optimizer_moments": 0.0})
    assert unheld.left_of(100.0) == 100.0 - max(10 + 15 + 8, 10 + 15 + 1 + 3)
