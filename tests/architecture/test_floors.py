# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Imports go downwards only; what is heavy or device-specific stays where it belongs."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_asynchzp"
TESTBED = ROOT / "scripts" / "testbed"
# fmt: off
FLOORS = {
    "engine/device": 0, "engine/schedule": 0, "errors": 0, "replacements": 0, "versions": 0,
    "engine/sharding": 1, "engine/failure": 1,
    "attention": 1, "weight_delta": 1,
    "checkpoint_files": 2, "engine/comm": 2, "planner": 2, "engine/zero": 3, "engine/at_rest": 4,
    "library": 5, "mcore": 5, "cpu_platform": 5,
    "hf": 6,  # reads and writes Megatron's checkpoints through megatron.core.dist_checkpointing
    "commands": 6, "launch": 7, "command": 7, "__main__": 8,
}
# Lines that a room may have. A commit that raises one says for which promise.
BUDGETS = {
    "attention": 2176,
    "checkpoint_files": 1597,
    "commands": 3134,
    "cpu_platform": 925,
    "engine, beside its rooms": 303,
    "engine/at_rest": 734,
    "engine/comm": 2599,
    "engine/failure": 847,
    "engine/sharding": 1688,
    "engine/zero": 4735,
    "hf": 2597,
    "library": 2667,
    "mcore": 11295,
    "planner": 4091,
    "beside the rooms": 702,
}
# Within the library.
LIBRARY = {
    "arguments": 0, "inference": 0, "inputs": 0, "meta_model": 0, "state": 0, "grads": 1,
    "params": 1, "runtime": 2, "optimizer": 2, "checkpoint": 3, "sharded_model": 4,
}
# Within the adapter: rooms, and files of a room that have a floor of their own.
ADAPTER = {
    "flags": 0, "patches.patch": 0, "run": 1, "process": 1, "attention": 1, "start": 2,
    "checkpoint": 3, "step": 4, "start.start_table": 5, "patches": 6, "start.startup": 7,
    "door": 8, "adaptor": 8,
}
# fmt: on

# The one import that stays on its floor; a test below keeps it to one file.
BESIDE = ("mcore", "cpu_platform")


def imported_modules(path: Path) -> set[str]:
    """Modules that are imported anywhere in the file, with `from package import module` in full."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide the floor"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update({name for name in inner if is_module(name)} or {node.module})
    return found


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def part_of(parts: Sequence[str]) -> str:
    """The part of the package that the names of folders and of a file below it belong to."""
    number = 2 if parts[0] == "engine" else 1
    return "/".join(parts[:number]).removesuffix(".py")


def sources() -> list[tuple[Path, str]]:
    """Each source file with the part of the package it belongs to."""
    pairs = []
    for path in PACKAGE.rglob("*.py"):
        part = part_of(path.relative_to(PACKAGE).parts)
        if not part.endswith("__init__"):
            pairs.append((path, part))
    assert len(pairs) > 10
    return pairs


def test_every_part_of_the_package_has_a_floor_and_imports_only_from_below():
    for path, part in sources():
        assert part in FLOORS, f"{path}: give {part} a floor"
        for module in imported_modules(path):
            package, *pieces = module.split(".")
            if package == "megatron_asynchzp" and pieces and (used := part_of(pieces)) != part:
                is_below = FLOORS[used] < FLOORS[part] or (part, used) == BESIDE
                assert is_below, f"{path} imports {module}"


def adapter_part(module: str) -> str:
    """The part of the adapter that has a floor: a file of a room, or the room."""
    room, _, file = module.removeprefix("megatron_asynchzp.mcore.").partition(".")
    own = f"{room}.{file.partition('.')[0]}"
    return own if own in ADAPTER else room


def test_within_the_adapter_too_imports_go_downwards_only():
    seen = set()
    for path in (PACKAGE / "mcore").rglob("*.py"):
        if path.stem == "__init__":
            continue
        part = adapter_part(".".join(path.relative_to(PACKAGE / "mcore").with_suffix("").parts))
        seen.add(part)
        for module in imported_modules(path):
            if module.startswith("megatron_asynchzp.mcore.") and adapter_part(module) != part:
                assert ADAPTER[adapter_part(module)] < ADAPTER[part], f"{path} imports {module}"
    assert seen == ADAPTER.keys()


def test_within_the_library_imports_go_downwards_only():
    seen = set()
    for path in (PACKAGE / "library").glob("*.py"):
        own = path.stem
        if own == "__init__":
            continue
        seen.add(own)
        for module in imported_modules(path):
            if module.startswith("megatron_asynchzp.library."):
                assert LIBRARY[module.split(".")[2]] < LIBRARY[own], f"{path} imports {module}"
    assert seen == LIBRARY.keys()


def test_no_room_has_more_lines_than_its_budget():
    found = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        room = part_of(parts[:-1]) if len(parts) > 1 else "beside the rooms"
        found[room if room != "engine" else "engine, beside its rooms"] += count_lines(path)
    assert found.keys() == BUDGETS.keys()
    over = {room: lines for room, lines in found.items() if lines > BUDGETS[room]}
    assert not over, f"lines over the budget: {over}"


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_every_floor_is_of_a_part_that_exists_and_is_the_one_of_the_documentation():
    assert set(FLOORS) == {part for _, part in sources()}
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d) \| `((?:engine/)?\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    assert {part: int(floor) for floor, part in rows} == FLOORS


def test_gathers_and_reductions_meet_in_the_step_alone():
    parts = {"gathers", "reductions"}
    for part in parts:
        names = {
            name.split(".")[-1] for name in imported_modules(PACKAGE / f"engine/zero/{part}.py")
        }
        assert not names & (parts | {"step", "autograd"}), part


def test_the_cpu_platform_stands_alone_and_one_file_of_the_adapter_uses_it():
    users = set()
    for path, part in sources():
        modules = {name for name in imported_modules(path) if name.startswith("megatron_asynchzp")}
        if part == "cpu_platform":
            known = ("megatron_asynchzp.cpu_platform", "megatron_asynchzp.replacements")
            assert all(name.startswith(known) for name in modules), path
        elif any("cpu_platform" in name for name in modules):
            users.add(str(path.relative_to(PACKAGE)))
    assert users == {"mcore/process/platform.py"}


def test_megatron_is_imported_by_the_adapter_and_by_three_more_folders():
    users = {
        part
        for path, part in sources()
        if any(module.split(".")[0] == "megatron" for module in imported_modules(path))
    }
    assert users == {"mcore", "cpu_platform", "commands", "hf"}


ONLY_IN = {
    "import threading": ("engine/comm/", "engine/failure/"),
    "torch.cuda": "engine/device.py",
    "torch.npu": "engine/device.py",
    "import triton": None,
}


def test_threads_devices_and_kernels_are_named_in_one_place_each_below_the_adapter():
    for path, part in sources():
        if FLOORS[part] < FLOORS["mcore"] and part != "attention":  # kernels know their device
            for word, home in ONLY_IN.items():
                is_home = home is not None and str(path.relative_to(PACKAGE)).startswith(home)
                assert is_home or word not in path.read_text(), f"{path}: {word}"


VENDORS = ("megatron", "triton", "torch_npu", "flash_attn", "transformer_engine", "matplotlib")
ATTENTION = "from megatron_asynchzp.attention import pasa, vendors, inspect, capture"


@pytest.mark.parametrize(
    ("first", "imports", "heavy"),
    [
        (
            "sys",
            "import megatron_asynchzp, megatron_asynchzp.hf",
            ("megatron", "triton", "torch", "transformers", "safetensors"),
        ),
        ("torch", ATTENTION, VENDORS),
    ],
)
def test_importing_the_package_or_attention_loads_nothing_heavy(first, imports, heavy):
    code = f"import sys, {first}; before = set(sys.modules); {imports}; "
    code += f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


def test_the_engine_and_the_planner_do_not_import_attention():
    for path, part in sources():
        if part.startswith("engine") or part == "planner":
            modules = imported_modules(path)
            assert not any(one.startswith("megatron_asynchzp.attention") for one in modules), path


# ---- the test-bed and scripts


def test_the_package_imports_neither_scripts_nor_tests_and_scripts_import_no_tests():
    for folder, banned in ((PACKAGE, {"scripts", "tests"}), (ROOT / "scripts", {"tests"})):
        paths = list(folder.rglob("*.py"))
        assert len(paths) > 10
        for path in paths:
            assert not {module.split(".")[0] for module in imported_modules(path)} & banned, path


# The measuring instruments are the same for every system: they import none of what they measure.
MEASURED = ("engine", "mcore", "cpu_platform", "attention")
KNOWS_SYSTEMS = ("attention", "contenders", "megatron_runs.py")


def test_the_instruments_of_the_test_bed_import_nothing_that_they_measure():
    instruments = [
        path
        for path in TESTBED.rglob("*.py")
        if path.relative_to(TESTBED).parts[0] not in KNOWS_SYSTEMS
    ]
    assert len(instruments) > 10
    for path in instruments:
        for module in imported_modules(path):
            assert module.split(".")[1:2] not in [[part] for part in MEASURED], f"{path}: {module}"


def test_reports_run_nothing_and_scripts_train_nothing_for_benchmarks():
    """report/ reads records, so it must not import what makes them; train/ is for users."""
    for folder, banned in (("report", ("bench", "train")), ("train", ("bench", "report"))):
        for path in (ROOT / "scripts" / folder).glob("*.py"):
            parts = {tuple(module.split(".")[:2]) for module in imported_modules(path)}
            assert not parts & {("scripts", name) for name in banned}, path


def test_no_script_and_no_module_changes_where_imports_are_found():
    names = ("launch.py", "commands/pretended_world.py", "commands/validation.py")
    runs_scripts_of_others = {*(PACKAGE / name for name in names), TESTBED / "rank.py"}
    runs_scripts_of_others.add(TESTBED / "te" / "environment.py")  # a package in the cache
    for folder in (PACKAGE, ROOT / "scripts"):
        for path in set(folder.rglob("*.py")) - runs_scripts_of_others:
            for node in ast.walk(ast.parse(path.read_text())):
                is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                if is_call and node.func.attr in ("insert", "append", "extend"):
                    assert ast.unparse(node.func.value) != "sys.path", path


def test_no_imports_go_in_a_circle():
    """Those within functions included."""

    def name(path: Path) -> str:
        parts = path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    paths = [path for folder in (PACKAGE, ROOT / "scripts") for path in folder.rglob("*.py")]
    assert len(paths) > 100
    TopologicalSorter({name(path): imported_modules(path) for path in paths}).prepare()


def test_no_includes_of_the_emulated_device_go_in_a_circle():
    """A source and its header are one."""
    needs: dict[str, set[str]] = {}
    for path in (TESTBED / "device").rglob("*.[ch]pp"):
        found = re.findall(r'^#include "(\w+)\.hpp"', path.read_text(), re.MULTILINE)
        needs.setdefault(path.stem, set()).update({*found} - {path.stem})
    assert len(needs) > 20
    TopologicalSorter(needs).prepare()


def test_what_holds_groups_units_or_modules_is_compared_by_identity():
    """By value such things of one rank would be equal, and one of them would stand for all in a
    dict. (Unhashable dataclasses are no keys.)"""
    things = re.compile(
        r"\b(ProcessGroup|AxisGroup|ShardGroups|HZPUnit|ShardParameter|Parameter|Module)\b"
    )
    by_value: list[str] = []
    for path, _ in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            marks = [ast.unparse(one) for one in node.decorator_list]
            held = [
                ast.unparse(one.annotation) for one in node.body if isinstance(one, ast.AnnAssign)
            ]
            if any(map(things.search, held)) and any("frozen=True" in one for one in marks):
                by_value += [f"{path}: {node.name}" for one in marks if "eq=False" not in one]
    assert not by_value
