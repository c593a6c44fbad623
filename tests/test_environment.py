# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The environment script and the test command: what they use and set, and their output and status
when nothing works. Nothing is installed here: installing is what CI does by running them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the environment is made from, in a folder of its own."""
    for name in ("pyproject.toml", "setup.py", "requirements/lock.txt", "scripts/environment.sh"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
    return tmp_path


def use_environment(checkout: Path, **env: str) -> subprocess.CompletedProcess:
    """Sources the script as the commands do, and prints the Python it chose."""
    script = 'set -euo pipefail; source scripts/environment.sh; echo "chosen: $PYTHON"'
    return subprocess.run(
        ["bash", "-c", script],
        cwd=checkout,
        env={"PATH": "/usr/bin:/bin", "HOME": "/none"} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def shim_folder(checkout: Path, names: tuple[str, ...]) -> Path:
    """Python names that are on PATH and run nothing, as pyenv leaves them."""
    folder = checkout / "shims"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("#!/bin/sh\necho pyenv: command not found >&2\nexit 127\n")
        (folder / name).chmod(0o755)
    return folder


def bash_only(checkout: Path) -> str:
    """A PATH with the commands that the script needs, and no Python at all."""
    folder = checkout / "commands"
    folder.mkdir()
    for name in ("bash", "sh", "cat", "dirname", "flock", "touch", "rm"):
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


def test_shims_that_run_nothing_end_in_advice_not_in_an_environment(checkout):
    for path in (
        "/usr/bin/python3.12",
        "/usr/bin/python3.13",
        "/usr/local/bin/python3.12",
        "/usr/local/bin/python3.13",
    ):
        if Path(path).exists():
            pytest.skip(f"{path} works here, so the script rightly finds it")
    shims = shim_folder(checkout, ("python3.12", "python3.13", "python3", "python3.14", "python"))
    done = use_environment(checkout, PATH=f"{shims}:{bash_only(checkout)}")
    assert done.returncode == 2 and "chosen" not in done.stdout
    assert "no Python 3.12 or later found" in done.stderr and "apt-get install" in done.stderr
    assert not (checkout / ".venv").exists()


def test_ranks_share_compiled_modules_where_none_may_lie_beside_the_sources(checkout):
    (checkout / "module_of_a_rank.py").touch()
    script = 'source scripts/environment.sh; "$PYTHON" -c "import module_of_a_rank"'
    env = {"PATH": "/usr/bin:/bin", "ASYNCHZP_PYTHON": sys.executable}
    refusal = {"PYTHONDONTWRITEBYTECODE": "1"}
    for more, folder in (
        ({}, "__pycache__"),
        (refusal, ".bytecode"),
        (refusal | {"PYTHONPYCACHEPREFIX": str(checkout / "given")}, "given"),
    ):
        subprocess.run(["bash", "-c", script], cwd=checkout, env=env | more, check=True)
        assert list((checkout / folder).rglob("module_of_a_rank.*.pyc"))


@pytest.mark.parametrize("given", [sys.executable, "/bin/false", "/absent/python"])
def test_a_given_environment_is_used_as_it_is_or_named_where_it_does_not_work(given, checkout):
    done = use_environment(checkout, ASYNCHZP_PYTHON=given)
    assert not (checkout / ".venv").exists()
    if given == sys.executable:
        assert (done.returncode, done.stdout) == (0, f"chosen: {given}\n"), done.stderr
    else:
        refusal = f"ASYNCHZP_PYTHON={given} is not a working Python"
        assert done.returncode == 2 and refusal in done.stderr


_NO_MEGATRON = """import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
"""


def test_a_given_environment_needs_the_modules_of_its_command_and_no_others(checkout):
    (checkout / "sitecustomize.py").write_text(_NO_MEGATRON)
    given = {"ASYNCHZP_PYTHON": sys.executable, "PYTHONPATH": str(checkout)}
    refused = use_environment(checkout, **given)
    assert refused.returncode == 2 and "megatron.training" in refused.stderr
    chosen = use_environment(checkout, ASYNCHZP_MODULES="torch", **given)
    assert (chosen.returncode, chosen.stdout) == (0, f"chosen: {sys.executable}\n"), chosen.stderr


def test_a_finished_environment_is_reused_until_its_inputs_change(checkout):
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to(sys.executable)
    inputs = [str(checkout) + "\n"]
    for name in ("pyproject.toml", "setup.py", "requirements/lock.txt"):
        inputs.append((checkout / name).read_text())
    (checkout / ".venv/.asynchzp-stamp").write_text("".join(inputs))
    path = bash_only(checkout)  # without a Python to install with, only reuse can succeed
    assert use_environment(checkout, PATH=path).stdout == f"chosen: {checkout}/.venv/bin/python\n"
    (checkout / "pyproject.toml").write_text("changed")
    shims = shim_folder(checkout, ("uv",))
    changed = use_environment(checkout, PATH=f"{shims}:{path}")
    assert "chosen" not in changed.stdout and changed.returncode == 2


# A Python whose tools end as the test says, and that is an interpreter for everything else.
_TOOLS = """#!/bin/sh
case "$*" in
    "-m basedpyright"*) echo "engine.py: error: a wrong type"; exit $TYPES_STATUS ;;
    "-m pytest"*) echo "pytest $*"; exit $TESTS_STATUS ;;
    "-m ruff"* | "-m scripts"* | "-c import scripts"* | "-m uv"*) exit 0 ;;
esac
exec "$REAL_PYTHON" "$@"
"""


@pytest.mark.parametrize("types, tests, status", [(0, 0, 0), (1, 0, 1), (1, 5, 5), (0, 5, 5)])
def test_the_test_command_fails_by_its_tests_and_with_all_by_its_types(
    types, tests, status, tmp_path
):
    python = tmp_path / "python"
    python.write_text(_TOOLS)
    python.chmod(0o755)
    statuses = {"TYPES_STATUS": str(types), "TESTS_STATUS": str(tests)}
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("test.sh", "lint.sh", "environment.sh"):
        shutil.copy(ROOT / "scripts" / name, scripts)
    other_versions = scripts / "test_versions.sh"  # it would keep what this Python pretends to make
    other_versions.write_text("#!/bin/sh\n")
    other_versions.chmod(0o755)
    for arguments, expected in ((), tests), (("--all",), status):
        done = subprocess.run(
            ["bash", scripts / "test.sh", *arguments],
            env=os.environ
            | {"ASYNCHZP_PYTHON": str(python), "REAL_PYTHON": sys.executable}
            | statuses,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == expected, done.stderr
        assert ("pytest -m pytest -m not slow" in done.stdout) == (not arguments)
        assert ("engine.py: error: a wrong type" in done.stdout) == bool(arguments)
