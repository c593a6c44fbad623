# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A model that is sharded module by module while it is built: its values are those of the model
built whole, whatever is done to it before it is complete.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp.engine.zero.construction import Construction
from megatron_asynchzp.engine.zero.plan import UnitPlan, plan_units
from megatron_asynchzp.engine.zero.unit import HZPUnit
from scripts.testbed.memory import ResidentMemory
from scripts.testbed.ranks import run_ranks
from tests.support.engine import nested_sizes, shard_groups, unshard
from tests.support.live_memory import live_nbytes
from tests.support.toy_models import Block

SIZES = (2, 2, 4)


def new_construction(sizes: tuple[int, int, int] = SIZES) -> Construction:
    return Construction({"dense": shard_groups(sizes)})


def build(
    construction: Construction | None, change: Callable[[list[nn.Module]], object] = lambda _: None
) -> nn.Module:
    """Two blocks with drawn biases and a scalar; each is sharded when it is complete, then `change`
    is called with those there are."""
    torch.manual_seed(5)
    blocks: list[nn.Module] = []
    for _ in range(2):
        block = Block(24)
        block.register_parameter("scale", nn.Parameter(torch.ones(())))
        for param in block.parameters():
            nn.init.normal_(param.data)
        blocks.append(block)
        if construction is not None:
            construction.shard(block)
        change(blocks)
    return nn.ModuleList(blocks)


def plans_of(model: nn.Module) -> list[UnitPlan]:
    return plan_units(model, list(model.children()))


def units_of(construction: Construction, plans: list[UnitPlan], sizes=SIZES) -> list[HZPUnit]:
    groups = shard_groups(sizes)
    units = [HZPUnit(p.name, p.params, groups, construction.take(p)) for p in plans]
    construction.close()
    return units


def assert_equal(units: list[HZPUnit], whole: nn.Module) -> None:
    """The units' gathered parameters, in every bit, are those of `whole`."""
    expected = dict(whole.named_parameters())
    for unit in units:
        unshard(unit)
        for name, param in zip(unit.param_names, unit.params, strict=True):
            assert type(param) is nn.Parameter
            assert param.dtype == expected[name].dtype and torch.equal(param, expected[name]), name
        unit.reshard()
    assert sum(len(unit.params) for unit in units) == len(expected)


def check_values() -> None:
    for sizes in nested_sizes(4):
        for convert in (nn.Module.float, nn.Module.bfloat16, nn.Module.half):
            construction = new_construction(sizes)
            model, whole = convert(build(construction)), convert(build(None))
            held = [construction.holds(param) for param in model.parameters()]
            assert held == [sizes[0] > 1] * len(held)
            assert_equal(units_of(construction, plans_of(model), sizes), whole)
            assert construction.describe_whole([]) == []


def test_the_shards_of_a_model_and_of_its_conversions_are_those_of_the_model_built_whole():
    run_ranks(check_values, 4)


def check_memory() -> None:
    nbytes = sum(param.nbytes for param in build(None).parameters())
    before = live_nbytes()
    construction = new_construction((4, 4, 4))
    model = build(construction)
    for convert, share in ((nn.Module.float, 1.0), (nn.Module.double, 2.0), (nn.Module.half, 0.5)):
        convert(model)
        held = live_nbytes() - before
        limit = share * (nbytes / 4 + 256 * len(list(model.parameters())))  # with padding
        assert held <= limit < 0.6 * share * nbytes, (share, held, nbytes)
    assert construction.peak_whole_nbytes <= 0.51 * nbytes


def test_a_module_that_is_complete_takes_the_memory_of_a_shard_also_when_it_is_converted():
    run_ranks(check_memory, 4)


def check_resident_memory() -> None:
    construction = new_construction((4, 4, 4))
    blocks: list[nn.Module] = []

    def build_more(number: int) -> None:
        for _ in range(number):
            blocks.append(Block(256))
            construction.shard(blocks[-1])

    build_more(2)  # what torch takes at the first one
    watched = ResidentMemory()
    build_more(16)
    whole = sum(param.numel() * param.itemsize for param in Block(256).parameters())
    held = watched.peak().beyond_nbytes / whole
    assert held < 6, held  # fourths of 16, and one


def test_a_process_does_not_come_to_hold_the_model_that_it_builds():
    run_ranks(check_resident_memory, 4)


def read_first(blocks: list) -> None:
    if len(blocks) == 2:
        blocks[1].up.weight.data.copy_(blocks[0].up.weight * 2)


def write_first(blocks: list) -> None:
    blocks[0].down.bias.data.fill_(len(blocks))


@torch.no_grad()
def write_in_place(blocks: list) -> None:
    blocks[0].up.bias.fill_(len(blocks))


def replace_first(blocks: list) -> None:
    blocks[0].down.bias.data = torch.full_like(blocks[0].down.bias, 7.0)


def write_through_storage(blocks: list) -> None:
    blocks[0].norm.weight.untyped_storage().fill_(0)


def run_first(blocks: list) -> None:
    with torch.no_grad():
        blocks[-1].up.bias.add_(blocks[0](torch.ones(24)).mean())


def copy_state(blocks: list) -> None:
    blocks[-1].load_state_dict(blocks[0].state_dict())


# The second block's weights are used too by those that are not here.
ONLY_THE_FIRST = [write_first, write_in_place, replace_first, write_through_storage]


def check_use() -> None:
    for change in (*ONLY_THE_FIRST, read_first, run_first, copy_state):
        construction = new_construction()
        model, whole = build(construction, change), build(None, change)
        plans = plans_of(model)
        held = [construction.holds(param) for _, param in plans[1].params]
        assert held == [change in ONLY_THE_FIRST] * len(held)
        units = units_of(construction, plans)
        assert_equal(units, whole)
        lines = construction.describe_whole(units)
        assert any(change.__name__ in line for line in lines), lines
        assert "stayed whole until the model was complete" in lines[0] and "MiB" in lines[0]


def test_a_module_whose_weights_are_used_before_the_end_is_whole_again_and_is_named():
    run_ranks(check_use, 4)


def check_copies() -> None:
    construction = new_construction()
    model, whole = build(construction), build(None)
    copied = deepcopy(model).double()
    for param, (name, expected) in zip(copied.parameters(), whole.named_parameters(), strict=True):
        assert type(param) is nn.Parameter and param.requires_grad
        assert torch.equal(param, expected.double()), name
    units = units_of(construction, plans_of(model.double()))
    assert_equal(units, whole.double())


def test_a_copy_of_a_module_is_whole_and_the_model_is_built_on():
    run_ranks(check_copies, 4)


def look_at(blocks: list) -> None:
    for param in (param for block in blocks for param in block.parameters()):
        assert isinstance(param, nn.Parameter) and param.requires_grad and param.is_leaf
        assert (param.dtype, param.device.type) == (torch.float32, "cpu")
        assert param.numel() == param.nelement() == param.shape.numel() and param.dim() < 3
        param.anything = hasattr(param, "something")


def check_looks() -> None:
    construction = new_construction()
    model = build(construction, look_at)
    assert all(construction.holds(param) for param in model.parameters())
    units = units_of(construction, plans_of(model))
    assert_equal(units, build(None))
    assert all(param.anything is False for unit in units for param in unit.params)


def test_shape_dtype_and_attributes_of_a_parameter_may_be_used_at_no_cost():
    run_ranks(check_looks, 4)


def check_other_units() -> None:
    construction = new_construction()
    model = build(construction)
    model[0].up.weight.requires_grad_(False)
    plans = plans_of(model)
    assert len(plans) == 3
    units = units_of(construction, plans)
    assert_equal(units, build(None))
    (line,) = construction.describe_whole(units)
    assert line.startswith("2 units (0 ... 0#2)") and "other units" in line


def test_parameters_that_turn_out_to_form_other_units_are_gathered_for_them():
    run_ranks(check_other_units, 4)


def check_first_rank() -> None:
    def broadcast(param: nn.Parameter) -> None:
        dist.broadcast(param.data, 0)

    def build_own(construction: Construction | None, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        block = Block(24)
        block.register_parameter("scale", nn.Parameter(torch.ones(())))
        if construction is not None:
            construction.shard(block)
        return nn.ModuleList([block])

    construction = Construction({"dense": shard_groups(SIZES)}, prepare=broadcast)
    model = build_own(construction, seed=dist.get_rank())
    assert_equal(units_of(construction, plans_of(model)), build_own(None, seed=0))


def test_parameters_can_be_made_equal_before_they_are_cut():
    run_ranks(check_first_rank, 4)
