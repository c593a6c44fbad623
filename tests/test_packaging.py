# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What installing the package does to an environment, and what the wheel holds."""

import contextlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from importlib import import_module
from importlib import metadata as metadata_of_packages
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_asynchzp
from megatron_asynchzp import command
from megatron_asynchzp.engine.comm.timeline import CAPTURE, COMPUTE
from megatron_asynchzp.errors import EXTRAS
from megatron_asynchzp.versions import untested
from scripts.testbed.ranks import run_ranks
from tests.support.bare_environment import PROJECT, forget_other_packages
from tests.support.installs import build_wheel

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def changes(folder: Path, installed: dict[str, str], asked: str) -> list[str]:
    """What a resolver would do to an environment with the packages `installed`, and nothing else,
    that is asked to install `asked`: lines as "+ name==version", sorted."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, version in installed.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: training\n"
        )
        (info / "RECORD").write_text("")
        (info / "INSTALLER").write_text("test")
    install = "uv pip install --dry-run --offline --no-config --python"
    line = [sys.executable, "-m", *install.split(), str(folder), asked]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"^ ([-+~] \S+)", done.stderr, re.MULTILINE))


OF_USERS = [
    {"megatron_core": "0.19.1", "torch": "2.12.0", "numpy": "1.26.4"},
    {"megatron_core": "0.18.2", "torch": "2.15.0", "numpy": "2.2.0"},
]


@pytest.mark.parametrize("there", OF_USERS)
@pytest.mark.parametrize("extra", ["", "[megatron]"])
def test_installing_adds_this_package_and_changes_nothing_that_was_there(
    tmp_path, wheel, extra, there
):
    found = changes(tmp_path / "env", there, f"megatron_asynchzp{extra} @ {wheel.as_uri()}")
    assert [line.partition("==")[0].split("@")[0] for line in found] == ["+ megatron-asynchzp"]


def test_the_dependencies_are_numpy_and_torch_without_upper_bounds(metadata):
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    numpy, torch = sorted(needed)
    assert numpy == "numpy"
    assert re.fullmatch(r"torch>=[\d.]+", torch)
    (locked,) = re.findall(r"^torch==([\d.]+)$", (ROOT / "requirements/lock.txt").read_text(), re.M)
    assert not list(untested({"torch": locked}))


def test_there_is_one_version_number(metadata):
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert citation is not None
    assert metadata["Version"] == megatron_asynchzp.__version__ == citation[1]


def test_the_wheel_has_every_file_of_the_package(wheel):
    """Data too: the planner's clusters, the source of the counting allocator."""
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "megatron_asynchzp").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        assert not sources - set(archive.namelist())


def test_the_wheel_has_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry,) = (name for name in names if name.endswith("/entry_points.txt"))
        assert "asynchzp = megatron_asynchzp.command:main" in archive.read(entry).decode()


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_is_a_function(name):
    one = command.COMMANDS[name]
    assert callable(getattr(import_module(f"megatron_asynchzp.{one.module}"), one.function))


def test_the_extras_that_messages_name_bring_the_packages():
    owners = metadata_of_packages.packages_distributions()
    for package, extra in EXTRAS.items():
        (project, *_) = owners.get(package, [package])
        wanted = [Requirement(line).name for line in PROJECT["optional-dependencies"][extra]]
        assert project.replace("_", "-").lower() in [one.replace("_", "-") for one in wanted]


def missing_at_import(extras: Sequence[str]) -> dict[str, str]:
    """Which modules of the package cannot be imported, and for want of what."""
    forget_other_packages(*extras)
    found = {}
    import megatron_asynchzp as ours

    for module in pkgutil.walk_packages(ours.__path__, f"{ours.__name__}."):
        # These patch Megatron when they are imported.
        if not module.name.endswith(("mcore.adaptor", "mcore.door.plugin")):
            try:
                import_module(module.name)
            except ModuleNotFoundError as error:
                found[module.name] = (error.name or "").partition(".")[0]
    return found


@pytest.mark.parametrize("extras", [(), ("megatron",)])
def test_every_module_can_be_imported_without_the_packages_that_few_of_its_users_need(extras):
    (found,) = run_ranks(missing_at_import, 1, extras)
    kernels = {name for name in found if ".attention.triton_" in name}
    assert {found.pop(name) for name in kernels} == {"triton"}
    assert set(found.values()) == ({"megatron"} if not extras else set())


LANES = (COMPUTE, CAPTURE)  # a step has them
TRAIN = (
    f"{ROOT}/scripts/train/pretrain_gpt.py --use-asynchzp --asynchzp-dry-run 1 --num-layers 2 "
    "--hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 63 --mock-data"
)

# A command, by the extra that is installed, and the one that the command needs as well.
LACKING = {
    "": {
        "launch train.py --use-asynchzp": "megatron",
        "asynchzp dry-run train.py": "megatron",
        "asynchzp plan --cluster h100 -- pretrain_gpt.py": "megatron",
        "asynchzp plan --cluster h100 --picture x.png -- pretrain_gpt.py": "plots",
        "asynchzp hf export --load x --output y": "hf",
        "asynchzp hf import --load x --save y": "hf",
        "asynchzp inspect qk.pt --picture x.png": "plots",
        "prepare_data x.txt --output-prefix y --tokenizer z": "hf",
        "plot_timeline x.json --output y.png": "plots",
    },
    "megatron": {
        "prepare_data x.parquet --output-prefix y": "data",
        f"launch {TRAIN} --optimizer muon": "muon",
        f"launch {TRAIN} --async-save --save x --save-interval 1 --use-persistent-ckpt-worker": (
            "resiliency"
        ),
    },
}


def said_without(extra: str, folder: Path, lines: Sequence[str]) -> list[tuple[int, str]]:
    """Status and standard error of each command."""
    forget_other_packages(*filter(None, [extra]))
    os.chdir(folder)
    ended = []
    for line in lines:
        program, *words = line.split()
        module = {
            "asynchzp": "megatron_asynchzp.command",
            "launch": "megatron_asynchzp.launch",
            "prepare_data": "scripts.train.prepare_data",
            "plot_timeline": "scripts.report.plot_timeline",
        }[program]
        error = io.StringIO()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = import_module(module).main(words)
            except SystemExit as end:
                status = end.code
        ended.append((status, error.getvalue()))
    return ended


@pytest.mark.parametrize("extra", LACKING)
def test_what_needs_a_package_that_is_missing_says_in_one_line_what_brings_it(extra, tmp_path):
    for name in ("x.txt", "x.parquet", "train.py"):
        (tmp_path / name).write_text("text")
    spans = [{"ph": "X", "cat": lane, "name": "a", "ts": 0, "dur": 1} for lane in LANES]
    (tmp_path / "x.json").write_text(json.dumps({"traceEvents": spans}))
    (ended,) = run_ranks(said_without, 1, extra, tmp_path, list(LACKING[extra]))
    for (line, wanted), (status, error) in zip(LACKING[extra].items(), ended, strict=True):
        assert status == 2, (line, error)
        advice = re.escape(f'pip install "megatron_asynchzp[{wanted}]"')
        pattern = rf".+: needs the package \w+, which is not installed; {advice}"
        assert re.fullmatch(pattern, error.splitlines()[-1]), (line, error)
        assert "Traceback" not in error


@pytest.mark.parametrize(
    "words, status, fragment",
    [
        ([], 2, "usage: asynchzp"),
        (["--help"], 0, "dry-run"),
        (["--version"], 0, megatron_asynchzp.__version__),
        (["x"], 2, "x: no such command (launch, "),
    ],
)
def test_the_command_prints_what_there_is(words, status, fragment, capsys):
    assert command.main(words) == status
    shown = capsys.readouterr()
    assert fragment in (shown.err if status else shown.out)


@pytest.mark.parametrize(
    "options, arguments, flag, per_node",
    [
        ([], [], ["--asynchzp-dry-run", "0"], None),
        (["--nnodes", "4", "--nproc-per-node=2"], ["--bf16"], ["--asynchzp-dry-run", "8"], "2"),
        (["--nnodes", "1:4", "--nproc-per-node", "4"], [], ["--asynchzp-dry-run", "0"], "4"),
        (["--nproc-per-node", "gpu"], [], ["--asynchzp-dry-run", "0"], None),
    ],
)
def test_a_dry_run_has_the_ranks_and_the_nodes_of_the_launch(
    options, arguments, flag, per_node, monkeypatch
):
    from megatron_asynchzp import launch

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")  # what is set within is taken back
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    started = []
    monkeypatch.setattr(launch, "main", started.append)
    assert command.main(["dry-run", *options, "train.py", *arguments]) == 0
    assert started == [["train.py", *flag, *arguments]]
    assert os.environ.get("LOCAL_WORLD_SIZE") == per_node
