# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A command on the test-bed: an unmodified script is on the modelled network, its status is the
command's, and nothing is left behind; and no command of the test-bed starts with a wrong option.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.testbed.command import RankCommand, run_as_ranks

SCRIPT = """
import sys
import torch, torch.distributed as dist
import neighbour

dist.init_process_group("gloo")
tensor = torch.ones(1 << 18)
dist.all_reduce(tensor, group=dist.new_group([0, 1], backend="gloo"))
print(tensor[0].item(), dist.get_backend(), neighbour.WORD, __name__, sys.argv[1:], flush=True)
dist.destroy_process_group()
"""


def start(*words: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], **pipes)


@pytest.mark.slow  # the network itself is fast, in test_fabric.py
def test_an_unmodified_script_on_gloo_is_on_the_modelled_network(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("WORD = 'found'")
    options = ["--nodes", "2", "--ranks", "1", "--inter-gbit", "0.1"]
    command = ["-m", "scripts.testbed", *options]
    process = start(*command, "--", str(tmp_path / "script.py"), "x")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == "2.0 fabric found __main__ ['x']\n"
    # A ring over two ranks: each sends half of the megabyte twice.
    for node in (0, 1):
        assert f"testbed: node {node} sent 1.05 MB to other nodes, 1.05 MB in all" in err


RUN_TWO = """
import sys
from scripts.testbed.command import RankCommand, run_as_ranks

sys.exit(run_as_ranks("testbed", [RankCommand([sys.executable, *sys.argv[1:]], {})] * 2))
"""


def test_after_ctrl_c_no_process_is_left(tmp_path):
    """Neither a rank nor what a rank has started."""
    (tmp_path / "script.py").write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "for pid in (os.getpid(), child.pid):\n"
        "    pathlib.Path(sys.argv[1], str(pid)).touch()\n"
        "time.sleep(300)\n"
    )
    (pids := tmp_path / "pids").mkdir()
    # Without the network, whose ranks would import torch.
    process = start("-c", RUN_TWO, str(tmp_path / "script.py"), str(pids))
    try:
        deadline = time.monotonic() + 120
        while len(list(pids.iterdir())) < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "testbed: interrupted" in err
    assert not [pid.name for pid in pids.iterdir() if is_running(pid.name)]


def is_running(pid: str) -> bool:
    """A zombie that nobody has waited for does not run."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    "codes, status, output",
    [
        (["", ""], 0, ""),
        ([SLEEP, "import os; os.kill(os.getpid(), 9)"], 137, "name: rank 1 ended with status 137"),
        ([SLEEP, "import no_such"], 1, "ModuleNotFoundError: No module named 'no_such'"),
        ([SLEEP, SLEEP], 124, "name: not finished after 5 s"),
    ],
)
def test_the_status_is_that_of_the_first_rank_that_fails_or_does_not_end(
    codes, status, output, capfd
):
    commands = [RankCommand([sys.executable, "-c", code], {}) for code in codes]
    assert run_as_ranks("name", commands, timeout_s=5) == status
    assert output in capfd.readouterr().err
