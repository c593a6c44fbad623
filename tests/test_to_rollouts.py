# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The example of a trainer that keeps rollout workers of another job up to date."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_4_workers_of_another_job_follow_8_trainer_ranks_bit_for_bit_by_deltas():
    command = [sys.executable, "-m", "scripts.train.to_rollouts", "--turns", "3"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = re.findall(r"turn (\d): 4 workers .* by ([\d.]+) MiB each; .* ([\d.]+) MiB", run.stdout)
    turns = [(float(sent), float(whole)) for _, sent, whole in lines]
    assert len(turns) == 3
    assert turns[0][0] == turns[0][1]
    assert all(0 < sent < 0.1 * whole for sent, whole in turns[1:])
