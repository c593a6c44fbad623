# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The files in patches/ against stub scripts: they add one line and hold nothing of Megatron's."""

import subprocess
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1] / "patches" / "megatron-lm-core_v0.19"
_PATCHES = sorted(_FOLDER.glob("*.patch"))
_LINE = "import megatron_asynchzp.mcore.adaptor  # --use-asynchzp; before anything of Megatron"

# Where the docstring of each script ends; the rest of a stub only has to be there.
_STUB_HEADS = {
    "pretrain_gpt": '# A copyright line.\n\n"""A docstring."""\n',
    "pretrain_hybrid": '# A copyright line.\n"""A docstring."""\n',
}
_STUB_REST = "\nimport time\n\nprint(__doc__)\n"


@pytest.mark.parametrize("patch", _PATCHES, ids=lambda path: path.stem)
def test_a_patch_is_one_added_line_without_context(patch):
    body = [line for line in patch.read_text().splitlines() if line[:3] not in ("---", "+++")]
    assert [line[:2] for line in body] == ["@@", "+i"]
    assert body[1] == "+" + _LINE


@pytest.mark.parametrize("patch", _PATCHES, ids=lambda path: path.stem)
@pytest.mark.parametrize("tool", [["git", "apply", "--unidiff-zero"], ["patch", "-s", "-p1", "-i"]])
def test_a_patch_puts_the_line_below_the_docstring_and_can_be_undone(tmp_path, patch, tool):
    script = tmp_path / f"{patch.stem}.py"
    head = _STUB_HEADS[patch.stem]
    script.write_text(head + _STUB_REST)
    try:
        subprocess.run([*tool, str(patch)], cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip(f"{tool[0]} is not installed")
    assert script.read_text() == head + _LINE + "\n" + _STUB_REST
    if tool[0] == "git":
        subprocess.run([*tool, "--reverse", str(patch)], cwd=tmp_path, check=True)
        assert script.read_text() == head + _STUB_REST


def test_every_patch_is_explained_in_the_readme():
    output = (_FOLDER / "README.md").read_text()
    assert _PATCHES and all(f"`{patch.name}`" in output for patch in _PATCHES)
