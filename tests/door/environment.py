# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Frameworks of the registry in folders of their own, and their runs on ranks of this machine.

Nothing of a framework is part of this project.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.testbed.compiler import CompileError, compiled_once, install_into
from scripts.testbed.ranks import free_port

ROOT = Path(__file__).parents[2]
SIZES = {"ASYNCHZP_PARAM_SHARD_SIZE": "2", "ASYNCHZP_GRAD_SHARD_SIZE": "2"}


def sizes_as_env(sizes: tuple[int, int, int]) -> dict[str, str]:
    names = ("PARAM", "GRAD", "OPTIM")
    return {f"ASYNCHZP_{n}_SHARD_SIZE": str(size) for n, size in zip(names, sizes, strict=True)}


def folder_of(packages: Sequence[str]) -> Path:
    """The folder with `packages`, none of their dependencies: torch and Megatron are there."""
    name = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]

    def fetch(out: Path) -> None:
        if reason := install_into(out, *packages):
            raise CompileError(reason)
        for ours in ("scripts", "tests"):  # verl's wheel has both, and Python would find them first
            shutil.rmtree(out / ours, ignore_errors=True)

    try:
        return compiled_once(f"framework-{name}", fetch)
    except CompileError as error:
        pytest.skip(f"the registry does not give {packages[0]}: {error}")


def run(
    folder: Path, module: str, out: Path, *args: str, env: dict[str, str], ranks: int = 2
) -> dict[str, Any]:
    """What a module of these tests writes to `out`, run by torchrun over the packages of `folder`.

    It gets `out` and `args`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), "-m", f"tests.door.{module}", str(out), *args]
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command,
        env=os.environ | paths | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        cwd=out.parent,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    return json.loads(out.read_text()) | {"log": ended.stdout}


def check_equal(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    """Losses and norms within 1e-6 of stock's, with a wrapper of ours."""
    assert stock["wrapper"] == "DistributedDataParallel"
    assert ours["wrapper"] == "DoorDataParallel"
    (stock_losses, stock_norms), (losses, norms) = zip(*stock["steps"]), zip(*ours["steps"])
    assert len(set(stock_losses)) == len(stock_losses) > 4
    assert losses == pytest.approx(stock_losses, rel=1e-6)
    assert norms == pytest.approx(stock_norms, rel=1e-6)


def check_built_in_shards(ours: dict[str, Any]) -> None:
    """A rank held at most its shards and two units of a model while it was built, by counting."""
    memory, [peak] = ours["memory"], ours["peaks"]
    limit = memory["shards"] + 2 * memory["unit"]
    assert peak <= limit < memory["whole"], (peak, memory)


def assert_close(steps: list, expected: list) -> None:
    assert steps == [pytest.approx(step, rel=1e-6) for step in expected]
