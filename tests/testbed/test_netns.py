# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The network-namespace launcher: real runs where the kernel allows them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.testbed import links, netns

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, torch, torch.distributed as dist
from scripts.testbed import fabric
fabric.register()
dist.init_process_group("fabric")
tensor = torch.ones(1 << 18)
dist.all_reduce(tensor)
print("sum", tensor[0].item(), os.environ["LOCAL_RANK"], flush=True)
dist.barrier()
os._exit(int(os.environ["RANK"] == os.environ.get("FAILING_RANK")))
"""


def launch(tmp_path: Path, *options: str, program: str = PROGRAM) -> subprocess.CompletedProcess:
    if (reason := links.unavailable()) is not None:
        pytest.skip(reason)
    (tmp_path / "program.py").write_text(program)
    command = ["-m", netns.__name__, *options, "--", sys.executable, str(tmp_path / "program.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # for what the program imports
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_ranks_in_namespaces_meet_over_shaped_links(tmp_path):
    output = launch(tmp_path, "--nodes", "2", "--ranks", "2", "--inter", "500mbit")
    assert output.returncode == 0, output.stderr
    assert output.stdout.split() == ["sum", "4.0", "0"]


@pytest.mark.slow
def test_a_failing_rank_or_a_time_limit_ends_the_run_with_a_status(tmp_path):
    failing = PROGRAM.replace('os.environ.get("FAILING_RANK")', '"1"')
    output = launch(tmp_path, "--nodes", "2", "--ranks", "1", program=failing)
    assert output.returncode == 1 and "rank 1 ended with status 1" in output.stderr
    output = launch(tmp_path, "--timeout", "1", program="import time; time.sleep(60)")
    assert output.returncode == 124 and "not finished after 1 s" in output.stderr
