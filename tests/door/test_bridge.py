# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron Bridge's own pretrain() trains, saves and resumes alike with stock DDP and AsyncHZP."""

from pathlib import Path

import pytest

from tests.door.environment import SIZES, check_equal, folder_of, run

PACKAGES = (
    "megatron-bridge==0.6.2 nvidia-modelopt==0.47.0 nvidia-resiliency-ext==0.7.0 "
    "megatron-energon==7.4.1 multi-storage-client==1.3.1 antlr4-python3-runtime==4.9.3 "
    "accelerate aiohttp attrs bitarray bitstring braceexpand bracex cffi click cpsat-logutils "
    "datasets decorator defusedxml deprecation diffusers dill filetype hydra-core ipython jmespath "
    "jsonschema jsonschema-specifications lark mfusepy mpmath multidict multiprocess omegaconf "
    "opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions orloge pandas peft "
    "prettytable prometheus-client psutil pulp pyarrow pycparser pyjwt pyroute2 python-dateutil "
    "pyyaml rapidyaml referencing regex rpds-py s3fs scipy six tensorboard timm tqdm traitlets "
    "tzdata wandb==0.29.0 wcmatch webdataset xattr xxhash yarl "
    "--python-platform x86_64-manylinux_2_39"  # nvidia-resiliency-ext asks for its glibc
)
SAVED_AT = 4


def pretrain(tmp_path: Path, name: str, folder: str, *words: str, ours: bool = True) -> dict:
    """The run `name` with checkpoints in `folder`, as `bridge_run` notes it."""
    system, env = ("ours", SIZES) if ours else ("stock", {})
    place = str(tmp_path / folder)
    packages = PACKAGES.split()
    return run(folder_of(packages), "bridge_run", tmp_path / name, place, system, *words, env=env)


@pytest.mark.slow
def test_pretrain_trains_and_resumes_as_stock_also_from_and_to_stock(tmp_path: Path):
    stock = pretrain(tmp_path, "stock.json", "of_stock", ours=False)
    ours = pretrain(tmp_path, "ours.json", "of_ours")
    check_equal(stock, ours)
    resumed = pretrain(tmp_path, "resumed.json", "of_ours", "load")
    assert resumed["steps"] == ours["steps"][SAVED_AT:]
    back = pretrain(tmp_path, "back.json", "of_ours", "load", ours=False)
    taken_over = pretrain(tmp_path, "taken_over.json", "of_stock", "load")
    for others in (back, taken_over):
        for step, expected in zip(others["steps"], stock["steps"][SAVED_AT:], strict=True):
            assert step == pytest.approx(expected, rel=1e-6)
