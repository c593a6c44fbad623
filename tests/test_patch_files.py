# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The files in patches/ against stub scripts: they add one line and hold nothing of Megatron's."""

import subprocess
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1] / "patches" / "megatron-lm-core_v0.19"
_LINE = "import megatron_asynchzp.mcore.adaptor  # --use-asynchzp; before anything of Megatron"

# Where the docstring of each script ends; the rest of a stub only has to be there.
_STUB_HEADS = {
    "pretrain_gpt": '# A copyright line.\n\n"""A docstring."""\n',
    "pretrain_hybrid": '# A copyright line.\n"""A docstring."""\n',
}
_STUB_REST = "\nimport time\n\nprint(__doc__)\n"


@pytest.mark.parametrize("name", _STUB_HEADS)
@pytest.mark.parametrize("tool", [["git", "apply", "--unidiff-zero"], ["patch", "-s", "-p1", "-i"]])
def test_a_patch_puts_the_line_below_the_docstring_and_can_be_undone(tmp_path, name, tool):
    script, patch = tmp_path / f"{name}.py", _FOLDER / f"{name}.patch"
    head = _STUB_HEADS[name]
    script.write_text(head + _STUB_REST)
    try:
        subprocess.run([*tool, str(patch)], cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip(f"{tool[0]} is not installed")
    assert script.read_text() == head + _LINE + "\n" + _STUB_REST
    if tool[0] == "git":
        subprocess.run([*tool, "--reverse", str(patch)], cwd=tmp_path, check=True)
        assert script.read_text() == head + _STUB_REST
