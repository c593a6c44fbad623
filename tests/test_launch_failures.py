# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How a run of Megatron ends before its time, as a user sees it: one line per rank with what
was going on, an exit status, and no waiting.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from megatron_asynchzp.engine.comm.timeline import LANES
from megatron_asynchzp.engine.schedule import SCHEDULES
from scripts.testbed.launches import Ended, Launch
from tests.support.selection import slow_unless
from tests.test_launch import TOY, await_third_step, torchrun

_ROOT = Path(__file__).parents[1]
_SCRIPT = _ROOT / "tests" / "support" / "struck_pretrain.py"
_LINE = (
    f"{TOY} --global-batch-size 6 --eval-iters 0 --untie-embeddings-and-output-weights "
    "--use-asynchzp --asynchzp-device cpu"
)
_WORLD_SIZE = 3
_SIZES = "--asynchzp-param-shard-size 3 --asynchzp-grad-shard-size 3"
# Far more than anything takes on a busy machine, far less than the 10 minutes of Megatron's limit.
_SOON_S = 150.0

# Operation, unit, ranks and step, or an error of Megatron's own collectives and the last of ours.
_NAMED = rf"({'|'.join(LANES.values())}) of \S+( units)? over ranks 0 to 2 in step \d+"


def start(folder: Path, kind: str, fault: str, iterations: int = 1000, **env: str) -> Launch:
    line = f"{_LINE} {_SIZES} --asynchzp-schedule {kind} --train-iters {iterations}"
    return Launch(folder, _SCRIPT, line, _WORLD_SIZE, {"INTERRUPT": fault, **env})


def last_line(ended: Ended, rank: int) -> str:
    """The one line of this rank about its end, which is the last that it printed."""
    output = [line for line in ended.own_lines if line.startswith("megatron_asynchzp: rank ")]
    assert len(output) == 1, ended.text[-3000:]
    assert output[0].startswith(f"megatron_asynchzp: rank {rank}: ")
    return output[0].removeprefix(f"megatron_asynchzp: rank {rank}: ")


@pytest.mark.parametrize("kind", [slow_unless(kind == "threaded", kind) for kind in SCHEDULES])
def test_when_a_rank_is_killed_every_other_ends_with_one_line_and_status_1(tmp_path, kind):
    ended = start(tmp_path, kind, "SIGKILL 1 forward 4").end(_SOON_S)
    assert [one.status for one in ended] == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        output = last_line(ended[rank], rank)
        assert re.search(_NAMED, output), output
        if output.startswith("Runtime"):  # Megatron's own collective met it first
            assert "Traceback" in ended[rank].text
        else:
            assert re.match(rf"{_NAMED} failed: a peer has ended", output) and len(output) < 500
    assert any("Traceback" not in ended[rank].text for rank in (0, 2))


@pytest.mark.parametrize("kind", [slow_unless(kind == "threaded", kind) for kind in SCHEDULES])
def test_ctrl_c_ends_every_rank_at_once_in_one_line_with_status_130(tmp_path, kind):
    run = start(tmp_path, kind, "", iterations=100000)
    run.await_text(" iteration        3/")
    run.signal(signal.SIGINT)
    start_s = time.monotonic()
    ended = run.end(_SOON_S)
    assert time.monotonic() - start_s < _SOON_S / 2
    for rank, one in enumerate(ended):
        assert one.status == 130
        assert last_line(one, rank) == "interrupted"
        assert "Traceback" not in one.text and one.text.endswith("interrupted\n")


def test_an_error_of_the_script_keeps_its_traceback_and_names_where_training_was(tmp_path):
    ended = start(tmp_path, "threaded", "raise 1 forward 4").end(_SOON_S)
    assert [one.status for one in ended] == [1, 1, 1]
    assert "OddError: not ours" in ended[1].text and "Traceback" in ended[1].text
    output = last_line(ended[1], 1)
    assert re.match(rf"OddError in step 2; the last collective submitted: {_NAMED}$", output)
    assert ended[1].text.endswith(output + "\n")
    for rank in (0, 2):
        assert re.search(_NAMED, last_line(ended[rank], rank))


@pytest.mark.parametrize("late", ["2", slow_unless(False, "")])
def test_a_run_that_comes_to_its_end_leaves_no_thread_and_prints_nothing(tmp_path, late):
    """Also where the rank that holds the store comes to its end two seconds before another, or the
    script ends without destroying the process groups."""
    ended = start(tmp_path, "threaded", "", iterations=2, LATE=late).end(_SOON_S)
    for one in ended:
        assert one.status == 0
        assert not [line for line in one.own_lines if " rank " in line]
        assert "Traceback" not in one.text and "Error" not in one.text
        assert ("threads: []" in one.text) == bool(late)


@pytest.mark.slow
@pytest.mark.parametrize("is_edited", [False, True])
def test_ctrl_c_under_torchrun_ends_the_job_with_one_line_per_rank(tmp_path, is_edited):
    """Whether it starts the launcher or a script that imports the adaptor."""
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(
        "import megatron_asynchzp.mcore.adaptor\n"
        f"import runpy\nrunpy.run_path({str(_SCRIPT)!r}, run_name='__main__')\n"
    )
    words = [str(script)] if is_edited else ["-m", "megatron_asynchzp.launch", str(_SCRIPT)]
    words += f"{_LINE} {_SIZES} --train-iters 100000".split()
    with torchrun(tmp_path, 3, words) as process:
        await_third_step(process, log)
        start_s = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(timeout=180) != 0
        # torchrun kills those that still run after 30 s.
        assert time.monotonic() - start_s < 25
    for rank in range(3):
        assert log.read_text().count(f"megatron_asynchzp: rank {rank}: interrupted") == 1
