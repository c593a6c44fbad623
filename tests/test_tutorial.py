# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The commands of the tutorial, and the site that is built of the documentation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def commands(page: Path) -> str:
    """The shell blocks of a page as one script."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(blocks)


@pytest.mark.slow
def test_the_tutorials_commands_lead_from_a_text_to_a_model_that_transformers_loads(tmp_path):
    script = commands(DOCS / "tutorial.md")
    script = script.replace("PRETRAIN", str(ROOT / "scripts/train/pretrain_gpt.py"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout + done.stderr)]
    assert len(losses) == 40 and losses[-1] < losses[0] / 2
    assert (tmp_path / "step.png").stat().st_size > 1000
    assert list((tmp_path / "events").iterdir())

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 2


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index.html", "tutorial/index.html", "results/compare/index.html"):
        assert (tmp_path / page).is_file(), page
