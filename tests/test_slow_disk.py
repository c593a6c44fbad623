# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A file system that stalls in a save: within the time limit of a collective the run goes on;
beyond it every rank ends with a line that names the save and who was writing, and nothing half is
chosen.
"""

import time
from pathlib import Path

import pytest

from megatron_asynchzp.checkpoint_files.choice import TRACKER, choose_checkpoint
from scripts.testbed.launches import Ended, Launch
from tests.test_launch import TOY

_SCRIPT = Path(__file__).parent / "support" / "struck_pretrain.py"
_LINE = (
    f"{TOY} --train-iters 4 --lr-decay-iters 4 --num-workers 0 --eval-iters 0 --hidden-dropout 0 "
    "--use-asynchzp --asynchzp-device cpu --save-interval 2"
)
_BESIDE = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
_LONG_S = 600  # no test takes that long, nor does it wait for the stall to end


def _run(folder: Path, slow: str, limit_s: float, flags: str = "") -> list[Ended]:
    place = folder / "checkpoints"
    line = f"{_LINE} --save {place} --load {place} {flags}"
    return Launch(folder, _SCRIPT, line, 2, {"SLOW": slow, "LIMIT_S": str(limit_s)}).end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "writer, file, newest, flags",
    [
        pytest.param(1, "__1_", 2, "", id="the data of one rank"),
        pytest.param(0, "__0_", 2, "", id="the data of the rank with the store"),
        pytest.param(1, "__1_", 2, _BESIDE, id="the data of one rank, beside training"),
        pytest.param(0, ".metadata", 2, "", id="the index"),
        # All that a checkpoint of Megatron's has is there, and is read before it is chosen.
        pytest.param(0, "asynchzp_manifest", 4, "", id="the manifest"),
    ],
)
def test_a_stall_beyond_the_time_limit_ends_all_ranks_with_the_save_and_the_writer(
    tmp_path, writer, file, newest, flags
):
    place = tmp_path / "checkpoints"
    start_s = time.monotonic()
    ended = _run(tmp_path, f"{writer} {_LONG_S} iter_0000004/{file}", 4, flags)
    assert time.monotonic() - start_s < _LONG_S / 2
    for rank, one in enumerate(ended):
        (line,) = [line for line in one.own_lines if f": rank {rank}: " in line]
        assert one.status == 1 and "Traceback" not in one.text, one.text[-3000:]
        assert f"the save of {place / 'iter_0000004'} failed: " in line
        assert f"; still writing: rank {writer}" in line and len(line) < 500
    choice = choose_checkpoint(place)
    assert choice is not None and choice.iteration == newest
    assert (place / TRACKER).read_text() == "2"
    more = f"--train-iters 6 --override-opt_param-scheduler {flags}"
    ended = _run(tmp_path, "1 1 iter_0000006/__1_", 120, more)  # and a stall within the limit
    assert [one.status for one in ended] == [0, 0], ended[0].text[-3000:]
    choice = choose_checkpoint(place)
    assert choice is not None and (choice.iteration, choice.lines) == (6, ())
