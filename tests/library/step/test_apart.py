# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that call a sharded model differently end in a line that says so, within seconds; a rank
that is only slow is waited for."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardedModel, ShardSizes, shard
from megatron_asynchzp.engine.comm.driver import crosses_groups
from megatron_asynchzp.engine.failure import last_line, roll_call, standstill
from megatron_asynchzp.engine.failure.standstill import Progress, why_apart
from scripts.testbed.ranks import observe_ranks, run_ranks
from tests.device.conftest import worlds as worlds
from tests.device.programs import device_of_rank
from tests.support.selection import slow_unless

SAYS_SO = "ranks called different modules, or different numbers of forwards"
WIDTHS = (8, 12, 4, 20, 8)  # gloo aborts where gathers of different sizes meet
LONG_S, SLOW_S = 60.0, 2.5
REMEDY = "; call the model alike on every rank, in evaluations and generation too"


class Loop:
    """What a script has."""

    def __init__(self, sizes: tuple[int, int, int]):
        torch.manual_seed(0)
        pairs = zip(WIDTHS, WIDTHS[1:])
        self.device, self.rank = device_of_rank(), dist.get_rank()
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs)
        ).to(self.device)
        self.sharded: ShardedModel = shard(
            self.model, list(self.model), ShardSizes(*sizes), lambda p: torch.optim.SGD(p, lr=0.1)
        )
        self.x = torch.ones(2, 8, device=self.device)

    def train(self, steps: int = 1, micro_batches: int = 1) -> None:
        for _ in range(steps):
            self.sharded.zero_grad()
            for index in range(micro_batches):
                self.sharded.set_is_last_micro_batch(index == micro_batches - 1)
                self.model(self.x).sum().backward()
            self.sharded.step()

    def generate(self, tokens: int) -> None:
        with torch.no_grad():
            for _ in range(tokens):
                self.model(self.x).sum().item()


def generates_longer_then_trains(loop: Loop) -> None:
    loop.generate(5 if loop.rank == 0 else 3)
    loop.train(3)


def generates_longer_then_closes(loop: Loop) -> None:
    loop.generate(3 if loop.rank == 0 else 5)


def evaluates_on_rank_0(loop: Loop) -> None:
    if loop.rank == 0:
        loop.generate(2)
    loop.train(3)


def skips_a_step(loop: Loop) -> None:
    loop.train(2 if loop.rank == 1 else 3)


def skips_a_micro_batch(loop: Loop) -> None:
    loop.train(2, micro_batches=2 if loop.rank == 1 else 3)


def takes_the_weights_alone(loop: Loop) -> None:
    if loop.rank == 1:
        for _ in loop.sharded.full_params():
            pass
    loop.train(3)


def is_slow(loop: Loop) -> None:
    """Each rank for several times as long as a rank needs to find out that others go elsewhere."""
    if loop.rank == 1:
        time.sleep(SLOW_S)
    loop.train()
    loop.generate(1)
    if loop.rank == 0:
        time.sleep(SLOW_S)
    dist.all_reduce(torch.ones(1, device=loop.device))
    loop.generate(1)
    if loop.rank == 1:
        time.sleep(SLOW_S)


def meets_instead(loop: Loop) -> None:
    loop.generate(5 if loop.rank == 0 else 3)
    dist.barrier()
    loop.train()


Case = Callable[[Loop], None]
TRIED: list[Case] = [is_slow, evaluates_on_rank_0]
MORE: list[Case] = [generates_longer_then_closes, generates_longer_then_trains]
MORE += [skips_a_step, skips_a_micro_batch]
MORE += [takes_the_weights_alone]


def end_of(case: Case, sizes: tuple[int, int, int]) -> tuple[str, float]:
    """The message with which `case` ends on this rank, and after how many seconds."""
    loop = Loop(sizes)
    loop.train(2)
    start = time.monotonic()
    try:
        case(loop)
        loop.sharded.close()
    except Exception as error:  # whatever it is, the test looks at it
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def ends_of(cases: list[Case], sizes: tuple[int, int, int]) -> list[tuple[str, float]]:
    last_line._GRACE_S = last_line._MAIN_PRINTS_S = 1.0
    roll_call._LOOKS_EVERY_S, roll_call.STANDS_STILL_S = 0.1, 0.4
    return [end_of(case, sizes) for case in cases]


def check(cases: list[Case], of_ranks: list[list[tuple[str, float]]]) -> None:
    for case, *ends in zip(cases, *of_ranks, strict=True):
        said = [message for message, _ in ends if message]
        assert bool(said) == (case is not is_slow), (case.__name__, said)
        for message in said:
            assert f"failed: {SAYS_SO}: rank " in message and message.endswith(REMEDY), message
        # Only where a rank has nothing to wait for any more it ends without a line.
        assert len(said) == len(ends) or case in (
            is_slow,
            generates_longer_then_closes,
            skips_a_step,
        )
        assert max(seconds for _, seconds in ends) < LONG_S


@pytest.mark.habit("an evaluation or a generation on some ranks alone, a rank that skips a batch")
@pytest.mark.parametrize(
    ("cases", "sizes"),
    [
        (TRIED, (2, 2, 2)),
        slow_unless(False, MORE, (2, 2, 2)),
        slow_unless(False, [*TRIED, *MORE], (2, 2, 4)),
        slow_unless(False, [is_slow, skips_a_step], (1, 1, 2)),
    ],
)
def test_ranks_that_call_the_model_differently_say_so_and_a_slow_one_is_waited_for(cases, sizes):
    check(cases, run_ranks(ends_of, max(sizes), cases, sizes))


def meet_instead(file: str) -> tuple[str, float]:
    if dist.get_rank() == 1:
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    end = ends_of([meets_instead], (2, 2, 2))[0]
    time.sleep(2)  # the other rank gets no error of gloo's before it ends itself
    return end


def test_a_rank_that_waits_in_a_collective_of_the_script_prints_the_line_and_ends(tmp_path):
    file = tmp_path / "stderr"
    (message, _), *others = observe_ranks(meet_instead, 2, str(file), num_survivors=1).values()
    assert SAYS_SO in message and not others
    line = file.read_text().strip().splitlines()[-1]
    assert line.startswith("megatron_asynchzp: rank 1: barrier over ranks 0, 1, called by meets_i")
    assert SAYS_SO in line and line.endswith(REMEDY)


# ---- what is compared

WAYS = ["gather a", "gather b", "reduce b", "grad-sync b", "gather a", "grad-sync a"]


def progress_after(names: list[str], is_closed: bool = False, calls: int | None = None) -> Progress:
    crossing = [name for name in names if crosses_groups(name)]
    awaited = {} if calls is None else {"the name of a group": calls}
    tasks, crossed = list(enumerate(names, 1)), list(enumerate(crossing, 1))
    return Progress.of_text(Progress(tasks, crossed, awaited, is_closed, "is here").to_text())


@pytest.mark.parametrize("in_step", [True, False])
def test_no_two_moments_of_one_program_are_apart(in_step):
    moments = [progress_after(WAYS[:length]) for length in range(len(WAYS) + 1)]
    for one in moments:
        assert not any(why_apart(0, one, 1, other, in_step) for other in moments)


@pytest.mark.parametrize("in_step", [True, False])
def test_another_order_an_early_end_and_a_wait_elsewhere_are_apart(in_step, monkeypatch):
    own = progress_after(WAYS)
    for other in (
        progress_after([*WAYS[:3], "grad-sync c"]),
        progress_after(WAYS[:3], is_closed=True),
        progress_after(WAYS[:3], calls=7),
    ):
        monkeypatch.setattr(standstill, "num_called", lambda name: 6)
        assert why_apart(0, own, 1, other, in_step)
        assert bool(why_apart(0, other, 1, own, in_step)) == (len(other.tasks) == 4)
        monkeypatch.setattr(standstill, "num_called", lambda name: 7)  # this rank has come there
        assert bool(why_apart(0, own, 1, other, in_step)) == (not other.calls)
    # Groups of ranks that compute in step may have other numbers of micro-batches.
    others = progress_after(["gather a", "gather b", *WAYS], is_closed=True)
    assert bool(why_apart(0, own, 1, others, in_step)) == in_step


def test_of_several_differences_the_first_is_named():
    own, other = (
        progress_after(["gather a", *names, "gather d"])
        for names in (["gather b", "gather c"], ["gather x", "gather y"])
    )
    text = why_apart(4, own, 9, other, in_step=True)
    assert "number 2 is 'gather b' on the first and 'gather x' on the second" in text
    assert "rank 4 is here; rank 9 is here" in text and "gather y" not in text
