# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""SIGTERM, as schedulers send it: a run that saves ends the step, saves, and ends with status 0."""

import signal
from pathlib import Path

import pytest

from megatron_asynchzp.checkpoint_files.choice import choose_checkpoint
from scripts.testbed.launches import Ended, Launch
from tests.support.journal import Attempt, read_journal
from tests.support.selection import slow_unless
from tests.test_launch import TOY, await_third_step, torchrun

_ROOT = Path(__file__).parents[1]
_SCRIPT = _ROOT / "tests" / "support" / "struck_pretrain.py"
_LAST = 8
# Two micro-batches a step. Dropout of hidden states draws, on the CPU platform, from the generator
# that a DataLoader draws from at its start.
_LINE = (
    f"{TOY} --lr 1e-2 --lr-decay-iters 100 --num-workers 1 --eval-iters 0 --hidden-dropout 0 "
    f"--train-iters {_LAST} --use-asynchzp --asynchzp-device cpu"
)


def _start(folder: Path, interrupt: str, flags: str) -> tuple[list[Ended], Attempt]:
    """Run two ranks to their end in `folder`, which is made."""
    folder.mkdir()
    journal = folder / "journal"
    journal.mkdir()
    env = {"INTERRUPT": interrupt, "JOURNAL": str(journal)}
    ended = Launch(folder, _SCRIPT, f"{_LINE} {flags}", 2, env).end()
    return ended, (read_journal(journal) or [Attempt()])[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, str]:
    """The loss of each step of a run that nobody interrupts and that saves nothing."""
    ended, attempt = _start(tmp_path_factory.mktemp("whole") / "run", "", "")
    assert [one.status for one in ended] == [0, 0], ended[0].text[-3000:]
    assert "exit_signal_handler" not in " ".join(ended[0].own_lines)
    assert list(attempt.losses) == list(range(1, _LAST + 1))
    return attempt.losses


@pytest.mark.parametrize(
    "interrupt, saved_at",
    [
        # Fast that of a stage below; what a save leaves whole has tests of its own.
        slow_unless(False, "1 forward 5", 3, id="one rank, in a step"),
        slow_unless(False, "all gather 20", None, id="all ranks, in a step"),
        slow_unless(False, "0 write 3", 5, id="one rank, in a save"),
        slow_unless(False, "all write 3", 5, id="all ranks, in a save"),
        slow_unless(False, "1 manifest 1", 5, id="before the manifest"),
        slow_unless(False, "0 forward 15", 8, id="in the last step"),
        slow_unless(False, "1 forward+write 5+1", 3, id="again, in the save"),
    ],
)
def test_sigterm_saves_the_step_in_progress_and_the_run_goes_on_from_it(
    tmp_path, whole, interrupt, saved_at
):
    place = tmp_path / "checkpoints"
    saving = f"--save {place} --save-interval 4"
    ended, first = _start(tmp_path / "first", f"SIGTERM {interrupt}", saving)
    for one in ended:
        assert one.status == 0, one.text[-3000:]
        assert "Traceback" not in one.text
        assert not [line for line in one.own_lines if " rank " in line]
    assert first.struck == interrupt.split()[1].split("+")
    assert sum("exit_signal_handler = True" in line for line in ended[0].own_lines) == 1
    last = first.last_step
    assert last == saved_at or (saved_at is None and last < _LAST)
    choice = choose_checkpoint(place)
    assert (choice.iteration, choice.lines) == (last, ())
    assert (place / "latest_checkpointed_iteration.txt").read_text() == str(last)
    ended, second = _start(tmp_path / "second", "", f"{saving} --load {place}")
    assert [one.status for one in ended] == [0, 0], ended[0].text[-3000:]
    assert second.began == last
    assert first.losses | second.losses == whole


def test_a_signal_to_one_stage_of_a_pipeline_stops_all_of_them_at_the_same_step(tmp_path):
    """They meet in no sharding group: each is a group of its own."""
    place = tmp_path / "checkpoints"
    flags = f"--pipeline-model-parallel-size 2 --save {place} --save-interval 100"
    # A step has 4 micro-batches.
    ended, attempt = _start(tmp_path / "run", "SIGTERM 1 forward 6", flags)
    assert [one.status for one in ended] == [0, 0], ended[0].text[-3000:]
    assert attempt.struck == ["forward"] and attempt.last_step == 2
    assert (choose_checkpoint(place).iteration, choose_checkpoint(place).lines) == (2, ())


def test_sigterm_before_the_arguments_are_read_ends_the_process_as_ever(tmp_path):
    flags = f"--save {tmp_path / 'checkpoints'} --save-interval 4"
    ended, attempt = _start(tmp_path / "run", "SIGTERM all start 1", flags)
    assert [one.status for one in ended] == [-signal.SIGTERM] * 2
    assert attempt.began is None and not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_sigterm_while_a_checkpoint_is_loaded_saves_after_the_first_step(tmp_path, whole):
    saving = f"--save {tmp_path / 'checkpoints'} --save-interval 4"
    _start(tmp_path / "first", "SIGTERM 0 forward 1", saving)
    flags = f"{saving} --load {tmp_path / 'checkpoints'}"
    ended, attempt = _start(tmp_path / "second", "SIGTERM all load 1", flags)
    assert [one.status for one in ended] == [0, 0]
    assert (attempt.began, attempt.losses) == (1, {2: whole[2]})
    assert choose_checkpoint(tmp_path / "checkpoints").iteration == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs",
    [("torch.distributed.run", 1), ("megatron_asynchzp.commands.torchrun", 0)],
    ids=["torch", "ours"],
)
def test_torchrun_hands_sigterm_on_and_waits_for_the_save(tmp_path, runs):
    """torch's ends with a status of its own, whatever that of the ranks is; ours with theirs."""
    place, log = tmp_path / "checkpoints", tmp_path / "log"
    saves = f"--train-iters 100000 --save {place} --save-interval 100000"
    words = ["-m", "megatron_asynchzp.launch", str(_SCRIPT), *f"{_LINE} {saves}".split()]
    module, status = runs
    with torchrun(tmp_path, 2, words, module) as process:
        await_third_step(process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == status
    text = log.read_text()
    assert "exiting program after receiving SIGTERM" in text
    assert ("SignalException" in text) == bool(status)
    choice = choose_checkpoint(place)
    assert choice.iteration >= 3 and choice.lines == ()
