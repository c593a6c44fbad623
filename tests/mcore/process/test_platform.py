# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where a process runs, and what it is refused before it trains on the wrong device."""

import os
import sys
from types import ModuleType

import pytest
import torch

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.patches.datasets import compile_helpers
from megatron_asynchzp.mcore.process import platform
from megatron_asynchzp.mcore.process.lost_device import sign_of_device

# --- an accelerator that torch does not see ----------------------------------------------------


@pytest.mark.parametrize(
    "files, environ, sign",
    [
        ((), {}, None),
        (("null", "nvme0"), {}, None),
        (("nvidia0",), {}, "nvidia0"),
        (("nvidiactl",), {}, "nvidiactl"),
        (("davinci3",), {}, "davinci3"),
        ((), {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
        ((), {"ASCEND_RT_VISIBLE_DEVICES": "0"}, "ASCEND_RT_VISIBLE_DEVICES=0"),
        ((), {"SLURM_JOB_GPUS": "0"}, "SLURM_JOB_GPUS=0"),
        ((), {"SLURM_JOB_GPUS": ""}, None),
        # Hidden on purpose.
        (("nvidia0",), {"CUDA_VISIBLE_DEVICES": ""}, None),
        (("nvidia0",), {"CUDA_VISIBLE_DEVICES": "-1", "SLURM_JOB_GPUS": "0"}, None),
    ],
)
def test_device_files_and_the_words_of_a_job_show_that_there_is_a_device(
    tmp_path, files, environ, sign
):
    for name in files:
        (tmp_path / name).touch()
    found = sign_of_device(environ, tmp_path)
    assert (found or "").removeprefix(f"{tmp_path}/") == (sign or "")


@pytest.fixture
def without_device(monkeypatch):
    """Torch sees no accelerator, the job was given one, and nothing is installed."""
    installed = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("megatron_asynchzp.cpu_platform.install", lambda: installed.append(1) or [])
    monkeypatch.setattr(platform, "lend_dataset_helpers", lambda: None)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return installed


def test_a_node_that_lost_its_device_is_refused_by_name_before_it_takes_the_cpu(without_device):
    with pytest.raises(ConfigurationError) as refused:
        platform.choose_platform(["--use-asynchzp"])
    line = str(refused.value)
    assert line.startswith(os.uname().nodename) and "CUDA_VISIBLE_DEVICES=0" in line
    assert torch.__version__ in line and "--asynchzp-device cpu" in line and "\n" not in line
    assert without_device == []


def test_a_node_that_lost_its_device_trains_on_its_cpu_where_it_is_asked_to(without_device):
    platform.choose_platform(["--use-asynchzp", "--asynchzp-device", "cpu"])
    assert without_device == [1]


# --- the compiled helpers of datasets ----------------------------------------------------------


@pytest.mark.parametrize("is_on_cpu", [False, True])
@pytest.mark.parametrize("has_makefile", [False, True])
@pytest.mark.parametrize("has_helpers", [False, True])
def test_megatron_compiles_its_helpers_only_where_it_can(
    monkeypatch, tmp_path, has_helpers, has_makefile, is_on_cpu
):
    package, name = ModuleType("datasets"), "megatron.core.datasets"
    package.__path__ = [str(tmp_path)]
    helpers = ModuleType("helpers_cpp") if has_helpers else None
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, f"{name}.helpers_cpp", helpers)
    monkeypatch.setattr(platform, "is_on_cpu", lambda: is_on_cpu)
    if has_makefile:
        (tmp_path / "Makefile").touch()
    made: list[bool] = []
    run = compile_helpers.make(lambda: made.append(True))
    if not has_makefile and not has_helpers:
        with pytest.raises(ConfigurationError, match="cannot be imported .* reinstall") as refused:
            run()
        assert "\n" not in str(refused.value)
    else:
        run()
    # A checkout on an accelerator keeps its `make`, which knows what has changed.
    assert bool(made) == (has_makefile and not (has_helpers and is_on_cpu))
