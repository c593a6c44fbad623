# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a user sees of a checkpoint that is refused: one line and an exit status of the launcher."""

from pathlib import Path

import pytest

from scripts.testbed.launches import Launch, launch
from tests.support.checkpoint_damage import NEWER
from tests.test_launch import TOY

_SCRIPT = Path(__file__).parents[2] / "support" / "legacy_pretrain.py"
_LINE = (
    f"{TOY} --train-iters 4 --eval-iters 0 --save-interval 2 --use-asynchzp --asynchzp-device cpu"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A directory with two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    ended = launch(folder, _SCRIPT, f"{_LINE} --save {folder / 'run'}", world_size=2)
    assert [one.status for one in ended] == [0, 0], ended
    return folder / "run"


def check_refusal(folder: Path, line: str, output: str) -> None:
    """The launch ends with status 2 and one line, the last that its first rank prints. The other
    one, which torchrun would end now, is not awaited."""
    run = Launch(folder, _SCRIPT, f"{_LINE} {line}", world_size=2)
    first = run.end(is_awaited=lambda rank: rank == 0)[0]
    assert first.status == 2, first.text[-3000:]
    assert first.own_lines[-1].startswith(f"megatron_asynchzp: {output}")
    assert first.text.endswith(first.own_lines[-1] + "\n")
    assert "Traceback" not in first.text and "lm loss" not in first.text


def test_a_checkpoint_of_another_model_is_named_with_both_values(tmp_path, saved):
    output = (
        f"{saved / NEWER} is of another model: --num-layers is 2 in the checkpoint and 3 in this"
    )
    check_refusal(tmp_path, f"--load {saved} --num-layers 3", output)


def test_a_second_run_into_the_directory_of_a_running_one_is_refused(tmp_path):
    place, logs = tmp_path / "run", tmp_path / "second"
    logs.mkdir()
    line = f"{_LINE} --train-iters 100000 --save-interval 100000 --save {place}"
    first = Launch(tmp_path, _SCRIPT, line, world_size=2)
    first.await_text(" iteration        1/")
    check_refusal(logs, f"--save {place}", f"--save {place}: another run is saving there")
    # It was still training: the first rank is killed here, the other may notice before it is.
    first_rank, other = first.end(0.0)
    assert first_rank.status == -9 and other.status in (-9, 1)
