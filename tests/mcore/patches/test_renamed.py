# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A Megatron in which something has another name, everywhere in it, as a later version may have: a
start is refused in one line that names it, before anything is trained."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
from megatron.core import package_info

# What is renamed, and how the line begins: functions that are replaced, a parameter of one,
# functions and classes that are imported, a module, a method of ours that Megatron calls.
RENAMED = {
    "get_megatron_optimizer": "megatron.core.optimizer.get_megatron_optimizer does not exist",
    "load_checkpoint": "megatron.training.checkpointing.load_checkpoint does not exist",
    "calc_params_l2_norm": "megatron.training.utils.common_utils.calc_params_l2_norm does",
    "report_theoretical_memory": "megatron.training.training.report_theoretical_memory does not",
    "skip_load_to_model_and_opt": "megatron.training.checkpointing.load_checkpoint takes (",
    "param_is_not_tensor_parallel_duplicate": "megatron.core.tensor_parallel.param_is_not_tensor",
    "get_model_config": "megatron.core.utils.get_model_config does not exist",
    "is_layer_window_attention": "megatron.core.transformer.utils.is_layer_window_attention does",
    "BaseTransformerLayer": "megatron.core.transformer.transformer_layer.BaseTransformerLayer does",
    "rerun_state_machine": "megatron.core.rerun_state_machine does not exist",
    "_unscale_main_grads_and_check_for_nan": "MixedPrecisionOptimizer._unscale_main_grads",
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A folder with Megatron, where a script finds it before the installed one."""
    folder = tmp_path_factory.mktemp("copy")
    installed = Path(megatron.core.__file__ or "").parents[1]
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(installed, folder / "megatron", ignore=ignored)
    (folder / "train.py").write_text("raise SystemExit('the script was started')\n")
    return folder


def rename(folder: Path, name: str) -> dict[Path, str]:
    """`name` gets another name in all of Megatron; the texts before, by file."""
    before: dict[Path, str] = {}
    word = re.compile(rf"\b{name}\b")
    for file in (folder / "megatron").rglob("*.py"):
        text = file.read_text()
        if word.search(text) or file.stem == name:
            before[file] = text
            file.write_text(word.sub(f"{name}_renamed", text))
            if file.stem == name:
                file.rename(file.with_stem(f"{name}_renamed"))
    return before


def put_back(before: dict[Path, str]) -> None:
    for file, text in before.items():
        file.with_stem(f"{file.stem}_renamed").unlink(missing_ok=True)
        file.write_text(text)


def start(*words: str) -> subprocess.CompletedProcess:
    """One of our modules with these words; what Python warns of is left out."""
    command = [sys.executable, "-W", "ignore", "-m", *words, "--use-asynchzp"]
    env = {name: value for name, value in os.environ.items() if "RANK" not in name}
    return subprocess.run(
        [*command, "--asynchzp-device", "cpu"], env=env, capture_output=True, text=True
    )


def own_lines(ended: subprocess.CompletedProcess) -> list[str]:
    """All on stderr but torch's log of what this machine has not."""
    return [one for one in ended.stderr.splitlines() if not re.match(r"[WI]\d{4} ", one)]


# By the rank itself, and by the command that starts ranks, which looks before it does.
BY_RANK, BY_COMMAND = ("megatron_asynchzp.launch",), ("megatron_asynchzp", "launch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [*((name, BY_RANK) for name in RENAMED), ("get_model_config", BY_COMMAND)]
)
def test_a_start_beside_a_megatron_with_another_name_is_refused_in_one_line(copy, name, words):
    before = rename(copy, name)
    try:
        ended = start(*words, str(copy / "train.py"))
    finally:
        put_back(before)
    assert before, f"Megatron has no {name}"
    (line,) = own_lines(ended)
    assert ended.returncode == 2 and line.startswith(f"megatron_asynchzp: {RENAMED[name]}")
    version = package_info.__version__.partition("+")[0]  # behind it is the commit of a checkout
    assert f"megatron-core {version} was found at {copy}" in line
    assert "is made for 0.18 and 0.19" in line


@pytest.mark.slow
def test_beside_the_copy_with_its_own_names_the_script_starts(copy):
    ended = start(*BY_RANK, str(copy / "train.py"))
    assert own_lines(ended) == ["the script was started"]
