# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the planner counts against what the engine issues: the same collectives, on 100 random
programs, with random sizes, schedules, pipelines, units and budgets."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from megatron_asynchzp.engine.comm.collectives import Steps, rounded_all_reduce_steps, run_steps
from megatron_asynchzp.engine.comm.driver import Driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.comm.task import Task
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.early_units import OuterTraffic
from megatron_asynchzp.engine.sharding.in_flight import FP32_NBYTES, UnitInFlight
from megatron_asynchzp.engine.sharding.layout import PARAM_ALIGNMENT_NUMEL, round_up
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.engine.zero.step import StepScheduler
from megatron_asynchzp.planner.cluster import Ring
from megatron_asynchzp.planner.order import StepOrder
from megatron_asynchzp.planner.program import (
    COMPUTE,
    GATHER,
    GRAD_SYNC,
    PARAM_SYNC,
    REDUCE,
    OrderUnit,
    Phase,
    Visit,
    stage_phases,
)
from megatron_asynchzp.planner.traffic import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Collective,
    Group,
    Wire,
    unit_collectives,
)
from scripts.testbed.fabric.reduction import Reduction
from scripts.testbed.fabric.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from tests.support import pipeline_stage
from tests.support.engine import cut_sizes, nested_sizes, on_submit
from tests.support.pipeline_order import Stage
from tests.support.recording_device import CountingDevice
from tests.support.recording_device import Group as ProcessGroup
from tests.support.scheduler_program import WORLD_SIZE, Execution, Program, Step, UnitShape, execute

LANES = {"gather": GATHER, "reduce": REDUCE, "grad-sync": GRAD_SYNC, "param-sync": PARAM_SYNC}


CUT = {sizes[:3]: sizes for sizes in cut_sizes(WORLD_SIZE)}
NUM_PROGRAMS, NUM_STEPS = 100, 2


def random_program(seed: int) -> Program:
    """Two equal steps: the second is in the steady state."""
    chance = random.Random(seed)
    numels = [chance.choice((24, 300, 2000)) for _ in range(chance.randint(1, 4))]
    step = Step(
        micro_batches=chance.choice((1, 1, 2, 2, 3)),
        warm_up=chance.choice((0, 0, 1, 2)),
        recomputes=chance.random() < 0.3,
        root=0 if len(numels) > 1 and chance.random() < 0.3 else None,
    )
    # Where the first unit is not trained, its gathers come before and after a step's first sync.
    frozen = chance.randint(1, len(numels))
    units = tuple(UnitShape(numel, i != frozen) for i, numel in enumerate(numels))
    depth, sizes = chance.randint(0, 3), chance.choice(nested_sizes(WORLD_SIZE))
    if seed % 3 == 0:
        sizes = CUT.get(sizes, sizes)
    budgets = [chance.choice((0, 0, 2**10, 2**12, 2**14)) for _ in ("params", "grads")]
    config = ScheduleConfig(
        "main-thread",
        prefetch_depth=depth,
        checks_order=False,
        keep_params_nbytes=budgets[0],
        keep_grads_nbytes=budgets[1],
        early_update=chance.choice(("off", "auto", "on")),
    )
    early = {"off": None, "auto": False, "on": True}[config.early_update]
    wire = chance.choice((torch.float32, torch.bfloat16))
    steps = (step,) * NUM_STEPS
    return Program(units, steps, config, sizes, 0, torch.bfloat16, early, wire=wire)


def group_of(program: Program) -> Group:
    wire = Wire(program.wire.itemsize)
    return Group(WORLD_SIZE, ShardSizes(*program.sizes), wire=wire)


def padded(shape: UnitShape, program: Program) -> int:
    """Elements of a unit's flat buffer: its weight is followed by the gap up to its bias."""
    group = group_of(program)
    return group.padded(round_up(shape.numel - 3, PARAM_ALIGNMENT_NUMEL) + 3)


def in_flight(index: int, shape: UnitShape, program: Program) -> UnitInFlight:
    sizes = ShardSizes(*program.sizes)
    topology = ShardTopology(WORLD_SIZE, 0, sizes)
    nbytes = program.config.grad_slot_nbytes
    numel = padded(shape, program)
    wire_nbytes = program.wire.itemsize
    return UnitInFlight.of(f"u{index}", numel, 2, shape.is_trained, topology, nbytes, wire_nbytes)


def order_of(program: Program) -> StepOrder:
    """The planner's description of the same program."""
    step, (param, grad, *_) = program.steps[-1], program.sizes
    units = [
        OrderUnit(
            padded(shape, program),
            in_flight(i, shape, program),
            param > 1,
            grad > 1,
            shape.is_trained,
            reduces_at_end=i == step.root,
            sum_nbytes=FP32_NBYTES * padded(shape, program),
            traffic=OuterTraffic.of(
                padded(shape, program), 2, program.wire.itemsize, ShardSizes(*program.sizes), 8
            ),
        )
        for i, shape in enumerate(program.units)
    ]
    visits = tuple(Visit(i) for i in range(len(units)) if i != step.root)
    if step.root is not None:
        visits = (Visit(step.root, visits),)
    ahead, phases = min(step.warm_up, step.micro_batches - 1), []
    phases = [Phase(True, 0, index) for index in range(ahead)]
    for index in range(step.micro_batches):
        if index + ahead < step.micro_batches:
            phases.append(Phase(True, 0, index + ahead))
        phases.append(Phase(False, 0, index, index == step.micro_batches - 1))
    return StepOrder(units, [visits], phases, program.config)


class Noting(CountingDevice):
    """before: of each task, in the order of submission, and of each computation its kind, its unit,
    and how many of each kind have happened when it begins."""

    def __init__(self):
        super().__init__()
        self.before: list[tuple[int, str, Counter[int]]] = []
        self.updates: list[int] = []  # how many of them came before each update
        self._num_expected: Counter[int] = Counter()
        self._of_lanes: dict[int, Counter[int]] = {}  # what the latest of each kind waited for

    def expect(self, kind: int, unit: str) -> tuple[int, int]:
        """`unit` will get an operation. Returns its place, and its number among those of its kind,
        which is its lane's clock when it has ended."""
        self.before.append((kind, unit, Counter()))
        self._num_expected[kind] += 1
        return len(self.before) - 1, self._num_expected[kind]

    def note(self, place: int) -> None:
        """The current stream gets what has this place."""
        kind, unit, _ = self.before[place]
        clock = self._clock(self._current())
        count = Counter({one: clock.get(_name(one), 0) for one in (COMPUTE, *LANES.values())})
        # Collectives of a lane run one after the other, whatever its stream waits for.
        count |= self._of_lanes.get(kind, Counter())
        self.before[place] = kind, unit, +count
        self._of_lanes[kind] = count + Counter([kind])

    def compute(self, unit: str) -> None:
        place, number = self.expect(COMPUTE, unit)
        self.note(place)
        self._clock(self._current())[_name(COMPUTE)] = number

    def attend(self, driver: Driver) -> None:
        def note_start(task: Task) -> None:
            if task.lane not in LANES:
                return  # a comparison, of which the planner knows nothing
            start, kind = task.start, LANES[task.lane]
            place, number = self.expect(kind, task.unit)

            def noted() -> Steps:
                self.note(place)
                last = yield from start()
                has_work = last is not None and last.work is not None
                end = last.work._end if has_work else self._clock(self._current())
                end[_name(kind)] = number
                return last

            task.start = noted

        on_submit(driver, note_start)


def _name(kind: int) -> str:
    return f"of kind {kind}"


class NotingScheduler(StepScheduler):
    """Its device notes each computation after what it waits for."""

    def __init__(self, *args):
        super().__init__(*args)
        use, device = self.gathers.unshard, self.driver.device
        self.gathers.unshard = lambda unit: (use(unit), device.compute(unit.name))

    def sync_params(self, skip_unchanged=False) -> None:
        self.driver.device.updates.append(len(self.driver.device.before))
        super().sync_params(skip_unchanged)


@cache
def executed(seed: int) -> tuple[Program, Execution]:
    program = random_program(seed)
    return program, execute(program, scheduler_class=NotingScheduler, new_device=Noting)


def engine_waits(done: Execution) -> list[tuple[int, str, Counter[int]]]:
    """As Noting.before; of the last step, of which alone it counts."""
    before, (*_, begin, end) = done.device.before, done.device.updates
    earlier = Counter(kind for kind, *_ in before[:begin])
    return [(kind, unit, count - earlier) for kind, unit, count in before[begin:end]]


def planned(program: Program) -> list[tuple[int, str]]:
    """Kind and unit of what is submitted."""
    actions = order_of(program).actions
    return [(one.kind, f"u{one.unit}") for one in actions if one.kind != COMPUTE]


@pytest.mark.parametrize("part", range(4))
def test_the_planner_submits_what_the_engine_submits_in_the_same_order(part):
    for seed in range(part, NUM_PROGRAMS, 4):
        program, done = executed(seed)
        submitted = [(kind, unit) for kind, unit, _ in engine_waits(done) if kind != COMPUTE]
        assert planned(program) == submitted, program


def planned_waits(program: Program) -> list[tuple[int, str, Counter[int]]]:
    """The same by the planner, whose lanes and main thread do one thing after another."""
    waits, ended = [], []  # ended: of each kind, when an action has
    last: dict[int, int] = {}
    for index, action in enumerate(order_of(program).actions):
        count: Counter[int] = Counter()
        for one in (*action.after, last.get(action.kind)):
            count |= Counter() if one is None else ended[one]
        waits.append((action.kind, f"u{action.unit}", count))
        ended.append(count + Counter([action.kind]))
        last[action.kind] = index
    return waits


@pytest.mark.parametrize("part", range(4))
def test_each_action_waits_in_the_planner_for_what_it_waits_for_in_the_engine(part):
    """By way of others too. Without recomputation, whose second forward the planner has as one with
    backward."""
    for seed in range(part, NUM_PROGRAMS, 4):
        program, done = executed(seed)
        if not program.steps[0].recomputes:
            assert planned_waits(program) == engine_waits(done), program


STAGES = [
    Stage(pp, vpp, micro_batches, rank)
    for pp, vpp, micro_batches in ((1, 1, 3), (4, 1, 6), (2, 2, 4), (2, 4, 4))
    for rank in sorted({0, pp - 1})
]


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_the_planner_submits_what_the_chunks_of_a_pipeline_stage_submit_within_their_budgets(stage):
    for rooms, depth in (((0, 0), 1), ((1, 0), 0), ((3, 1), 1), ((2, 3), 2)):
        done = pipeline_stage.executed(CountingDevice(), stage, rooms, depth=depth)
        sizes, numel = pipeline_stage.SIZES, done.padded
        topology = ShardTopology(WORLD_SIZE, 0, ShardSizes(*sizes))
        units = [
            OrderUnit(
                numel,
                UnitInFlight.of(unit.name, numel, 2, True, topology, done.config.grad_slot_nbytes),
                sum_nbytes=FP32_NBYTES * numel,
            )
            for chunk in done.chunks
            for unit in chunk.units
        ]
        visits = [
            [Visit(chunk * stage.layers + layer) for layer in range(stage.layers)]
            for chunk in range(stage.vpp)
        ]
        phases = stage_phases(stage.rank, stage.pp, stage.vpp, stage.micro_batches)
        order = StepOrder(units, visits, phases, done.config)
        names = [unit.name for chunk in done.chunks for unit in chunk.units]
        found = [(one.kind, names[one.unit]) for one in order.actions if one.kind != COMPUTE]
        submitted = [(LANES[lane], unit) for lane, unit in done.submitted[2] if lane in LANES]
        assert found == submitted, (rooms, depth)


def test_some_programs_keep_what_a_budget_allows():
    """Of those above, with it or without: gathers, and reductions, that it saves."""
    saved = Counter()
    for seed in range(NUM_PROGRAMS):
        program = random_program(seed)
        kinds = Counter(kind for kind, _ in planned(program))
        config = replace(program.config, keep_params_nbytes=0, keep_grads_nbytes=0)
        saved += Counter(kind for kind, _ in planned(replace(program, config=config))) - kinds
    assert saved[GATHER] > 20 and saved[REDUCE] > 20


def as_recorded(kind: int, numel: int, group: Group) -> list[tuple[str, int, int]]:
    """Operation, ranks and what is written, of each collective of one operation on a unit."""
    return [
        (
            each.operation,
            each.size,
            each.numel // each.size if each.operation == REDUCE_SCATTER else each.numel,
        )
        for each in unit_collectives(kind, numel, itemsize=2, group=group)
    ]


@pytest.mark.parametrize("part", range(4))
def test_every_collective_has_the_ranks_and_the_elements_that_the_engines_has(part):
    for seed in range(part, NUM_PROGRAMS, 4):
        program, done = executed(seed)
        group = group_of(program)
        expected: Counter = Counter()
        for lane, unit in done.submitted:
            if lane not in LANES:  # the comparison of what was sent: a number for each unit
                numbers = len(done.scheduler.units)
                for one in done.scheduler.units[0].groups.all_reduce_axes:
                    expected[ALL_REDUCE, one.axis.size, numbers] += 1
                continue
            numel = padded(program.units[int(unit[1:])], program)
            expected.update(as_recorded(LANES[lane], numel, group))
        found = Counter(
            (one.operation, len(one.group.ranks), one.numel) for one in done.collectives
        )
        assert found == expected, program


def test_sums_in_bf16_over_replicas_that_do_not_divide_a_shard_are_padded_as_the_engines_are():
    for ranks, sizes, numel in product((3, 5, 6, 12), ((1, 1, 1), (1, 1, 2), (3, 3, 3)), (1, 200)):
        if ranks % sizes[2] == 0:
            group = Group(ranks, ShardSizes(*sizes), wire=Wire(torch.bfloat16.itemsize))
            padded, device = group.padded(numel), CountingDevice()
            with device.recording():
                topology = ShardTopology(ranks, 0, group.sizes)
                groups = ShardGroups.of_topology(topology, range(ranks), ProcessGroup)
                shard = torch.zeros(padded // sizes[2])
                run_steps(rounded_all_reduce_steps(shard, groups.replica_sync, torch.bfloat16))
            found = [(one.operation, one.numel) for one in device.collectives]
            planned = unit_collectives(GRAD_SYNC, padded, 2, group)[len(group.axes(*sizes[1:])) :]
            assert found == [(one.operation, one.numel) for one in planned], group


class CountingLink:
    """What one rank sends in a ring, without another rank."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.nbytes = self.messages = 0

    def exchange(self, send=None, to=0, receive=None, source=0) -> None:
        if send is not None:
            self.nbytes += send.numel() * send.element_size()
            self.messages += 1
        if receive is not None:
            receive.zero_()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_ring_sends_the_bytes_and_messages_that_the_test_bed_counts(size):
    numel, how = 64 * size, Reduction("sum", torch.add, None)
    for operation, run in (
        (ALL_GATHER, lambda link, full: ring_all_gather(link, full.view(size, -1))),
        (ALL_REDUCE, lambda link, full: ring_all_reduce(link, full, how)),
        (
            REDUCE_SCATTER,
            lambda link, full: ring_reduce_scatter(
                link, full.view(size, -1), torch.zeros(numel // size), how
            ),
        ),
    ):
        link = CountingLink(0, size)
        run(link, torch.zeros(numel))
        counted = Collective(operation, numel, 4, size, 1)
        assert (counted.wire_nbytes, counted.messages) == (link.nbytes, link.messages), operation


def test_what_leaves_a_node_is_what_the_ranks_of_a_ring_send_across_its_border():
    """Counted neighbour by neighbour, for every axis of 16 ranks on nodes of 1 to 16."""
    for per_node in (1, 2, 4, 8, 16):
        for size in (1, 2, 4, 8, 16):
            for stride in [s for s in (1, 2, 4, 8) if s * size <= 16]:
                ring = Ring.of_axis(size, stride, per_node)
                crossing = 0
                for rank in range(per_node):  # of node 0
                    place = rank // stride % size
                    after = rank + ((place + 1) % size - place) * stride
                    crossing += after // per_node != 0
                expected = crossing * (size - 1) * 1000 / size
                assert ring.node_nbytes(1000) == pytest.approx(expected), (per_node, size, stride)
