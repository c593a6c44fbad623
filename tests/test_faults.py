# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A run under `torchrun --max-restarts` whose ranks are killed again and again comes to the same
end as one that nobody disturbs, and loses no step but those since its last checkpoint.
"""

import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts.testbed.launches import Ended, Launch, processes_with
from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS
from tests.support.journal import Attempt, read_journal
from tests.test_launch import TOY, torchrun

_ROOT = Path(__file__).parents[1]
_SCRIPT = _ROOT / "tests" / "support" / "struck_pretrain.py"
_INTERVAL = 2
_LINE = (
    f"{TOY} --lr-decay-iters 100 --num-workers 0 --eval-iters 0 --hidden-dropout 0 "
    "--use-asynchzp --asynchzp-device cpu"
)

_EARLY = "--asynchzp-param-shard-size 1 --asynchzp-early-update on"

# How often the process has been at a place when it is killed there, at most: within a few steps.
_AT_MOST = {"forward": 10, "gather": 40, "reduce": 20, "write": 60, "manifest": 2, "tracker": 2}
_AT_MOST |= {"load": 1, "time": 1500}


_SENT_EARLY = {kind: most for kind, most in _AT_MOST.items() if kind != "gather"}
_SENT_EARLY |= {"preview": 12}


@dataclass(frozen=True)
class Setting:
    """A run on `world_size` ranks that is killed at the places `at_most`.

    leaves_processes: whether stock Megatron leaves some behind a rank that is killed.
    """

    flags: str
    world_size: int = 2
    leaves_processes: bool = False
    at_most: dict[str, int] = field(default_factory=lambda: _AT_MOST)


_WRITTEN_ELSEWHERE = {kind: most for kind, most in _AT_MOST.items() if kind != "write"}
SETTINGS = {
    "budgets": Setting("--asynchzp-keep-params-gb 1 --asynchzp-keep-grads-gb 1"),
    "experts": Setting(" ".join([*MIXTURE_OF_EXPERTS, "--expert-model-parallel-size 2"])),
    "pipeline": Setting("--pipeline-model-parallel-size 2", world_size=4),
    "states on the host": Setting("--optimizer-cpu-offload --optimizer-offload-fraction 0.6"),
    "saves beside training": Setting(
        "--async-save --use-persistent-ckpt-worker --async-strategy mcore",
        leaves_processes=True,  # that of the queue between rank and writer
        at_most=_WRITTEN_ELSEWHERE,  # a process of its own writes
    ),
}


def make_plan(
    num_faults: int, seed: int, at_most: dict[str, int] = _AT_MOST, world_size: int = 2
) -> list[str]:
    """A random rank at a random moment each time, and every kind of moment about as often."""
    numbers = random.Random(seed)
    kinds = (list(at_most) * num_faults)[: num_faults - 1]
    numbers.shuffle(kinds)
    # There is something to load once the first has run to its fifth step.
    moments = [("forward", 9)] + [(kind, numbers.randint(1, at_most[kind])) for kind in kinds]
    ranks = [numbers.randrange(world_size) for _ in moments]
    return [f"SIGKILL {rank} {kind} {at}" for rank, (kind, at) in zip(ranks, moments)]


@dataclass
class Job:
    """A run that was killed as often as its plan has lines."""

    attempts: list[Attempt]
    text: str
    status: int
    left: dict[int, str]

    @property
    def losses(self) -> dict[int, str]:
        """By step, every attempt's checked against those before."""
        found: dict[int, str] = {}
        for attempt in self.attempts:
            for step, loss in attempt.losses.items():
                assert found.setdefault(step, loss) == loss, step
        return found

    def lost_steps(self) -> list[int]:
        """For each attempt that trained, how many steps it makes again."""
        reached, lost = 0, []
        for attempt in self.attempts:
            if attempt.began is not None:
                lost.append(reached - attempt.began)
                reached = attempt.last_step
        return lost[1:]

    def check_origins(self) -> None:
        """Every attempt goes on from the newest checkpoint: the last that was complete, or one
        that became so when the rank died before it could note it."""
        complete, begun = 0, 0
        for attempt in self.attempts:
            if attempt.began is not None:
                assert complete <= attempt.began <= begun
            complete = max([complete, *map(_iteration, attempt.saved)])
            begun = max([begun, *map(_iteration, attempt.saving)])


def _iteration(folder: str) -> int:
    return int(folder.removeprefix("iter_"))


def run_job(folder: Path, plan: list[str], train_iters: int, flags: str = "") -> Job:
    """Train under torchrun, and be killed according to `plan`."""
    journal, place = folder / "journal", folder / "checkpoints"
    journal.mkdir()
    (folder / "plan").write_text("\n".join(plan))
    words = ["--max-restarts", str(len(plan) + 5), "-m", "megatron_asynchzp.launch", str(_SCRIPT)]
    words += f"{_LINE} {flags} --train-iters {train_iters}".split()
    words += f"--load {place} --save {place}".split()
    words += ["--save-interval", str(_INTERVAL)]
    env = {"JOURNAL": str(journal), "INTERRUPT": str(folder / "plan")}
    # Else ranks that are started again meet, in the store of torchrun, their dead predecessors.
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with torchrun(folder, 2, words, **env) as process:
        status = process.wait(timeout=120 + 60 * len(plan))
    left = processes_with(f"JOURNAL={journal}")
    return Job(read_journal(journal), (folder / "log").read_text(), status, left)


def start_again_and_again(folder: Path, plan: list[str], train_iters: int, setting: Setting) -> Job:
    """As `run_job`, without torchrun: all ranks are forked from one process that has imported
    everything, which costs a fraction of a start."""
    journal, place = folder / "journal", folder / "checkpoints"
    journal.mkdir()
    (folder / "plan").write_text("\n".join(plan))
    line = f"{_LINE} {setting.flags} --train-iters {train_iters} --load {place} --save {place}"
    env = {"JOURNAL": str(journal), "INTERRUPT": str(folder / "plan")}
    ended: list[Ended] = []
    for restart in range(len(plan) + 5):
        env["TORCHELASTIC_RESTART_COUNT"] = str(restart)
        words = f"{line} --save-interval {_INTERVAL}"
        ended = Launch(folder, _SCRIPT, words, setting.world_size, env).end()
        if not any(one.status for one in ended):
            break
    status = max(abs(one.status) for one in ended)
    left = processes_with(f"JOURNAL={journal}")
    if setting.leaves_processes:
        while left:
            os.kill(left.popitem()[0], signal.SIGKILL)
    return Job(read_journal(journal), ended[0].text, status, left)


def run_undisturbed(
    folder: Path, train_iters: int, flags: str = "", world_size: int = 2
) -> dict[int, str]:
    """The loss of each step, with all its bits."""
    journal = folder / "undisturbed"
    journal.mkdir()
    line = f"{_LINE} {flags} --train-iters {train_iters}"
    ended = Launch(folder, _SCRIPT, line, world_size, {"JOURNAL": str(journal)}).end()
    assert [one.status for one in ended] == [0] * world_size, ended[0].text[-3000:]
    return read_journal(journal)[0].losses


def check_job(job: Job, plan: list[str], whole: dict[int, str], most_lost: int = _INTERVAL) -> None:
    assert job.status == 0, job.text[-5000:]
    assert [one.struck for one in job.attempts] == [[line.split()[2]] for line in plan] + [[]]
    assert job.losses == whole
    job.check_origins()
    # A step that was made, and the one in which the next save would have come.
    assert all(0 <= lost <= most_lost for lost in job.lost_steps())
    assert job.left == {}


@pytest.mark.slow
@pytest.mark.parametrize("num_faults, steps", [(2, 8), (30, 120)])
def test_random_kills_change_no_bit_of_the_losses(tmp_path, num_faults, steps):
    plan = make_plan(num_faults, seed=1234)
    assert num_faults < 30 or {line.split()[2] for line in plan} == set(_AT_MOST)
    check_job(run_job(tmp_path, plan, steps), plan, run_undisturbed(tmp_path, steps))


@pytest.mark.slow
def test_random_kills_between_sending_and_updating_change_no_bit_of_the_losses(tmp_path):
    """Beside a run without early updates."""
    plan = [*make_plan(8, 5678, _SENT_EARLY), "SIGKILL 0 preview 3", "SIGKILL 1 preview 9"]
    job = run_job(tmp_path, plan, 40, _EARLY)
    check_job(job, plan, run_undisturbed(tmp_path, 40))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_random_kills_change_no_bit_whatever_the_engine_keeps_or_megatron_divides(tmp_path, name):
    setting = SETTINGS[name]
    plan = make_plan(15, len(name), setting.at_most, setting.world_size)
    # Without a folder Megatron refuses to save beside training.
    flags = setting.flags.partition("--async-save")[0]
    whole = run_undisturbed(tmp_path, 60, flags, setting.world_size)
    job = start_again_and_again(tmp_path, plan, 60, setting)
    # A save beside training is complete when the next one begins.
    most_lost = 2 * _INTERVAL if "--async-save" in setting.flags else _INTERVAL
    check_job(job, plan, whole, most_lost)
