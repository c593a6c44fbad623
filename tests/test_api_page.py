# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The page of public names has each of them, with every argument, and none that is not there."""

import dataclasses
import inspect
import re
from pathlib import Path

import megatron_asynchzp
from megatron_asynchzp import ScheduleConfig, ShardedModel, ShardSizes, shard

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}


def first_column(section: str) -> set[str]:
    """Names in the first column of a section's table, without their arguments."""
    rows = re.findall(r"^\| (`.*?) \|", SECTIONS[section], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)(?:\(.*?\))?`", row)}


def test_the_page_has_every_public_name():
    assert set(megatron_asynchzp.__all__) <= set(SECTIONS)


def test_the_page_has_every_argument_of_shard_with_its_default():
    assert first_column("shard") == set(inspect.signature(shard).parameters)
    (line,) = re.findall(r"`shard\((.*?)\)`\n", SECTIONS["shard"])
    names = [word.strip().partition("=")[0] for word in line.split(",")]
    assert [name for name in names if name != "*"] == list(inspect.signature(shard).parameters)


def test_the_page_has_every_field_and_method_and_no_other():
    assert first_column("ScheduleConfig") == {
        one.name for one in dataclasses.fields(ScheduleConfig)
    }
    methods = {name for name in vars(ShardedModel) if not name.startswith("_")}
    assert first_column("ShardedModel") == methods | {"model", "optimizer", "runtime"}
    for name in methods:
        arguments = list(inspect.signature(getattr(ShardedModel, name)).parameters)[1:]
        written = re.findall(rf"^\| `{name}\((.*?)\)`", SECTIONS["ShardedModel"], re.MULTILINE)[0]
        assert re.findall(r"(\w+)(?:=\w+)?", re.sub(r"=\w+", "", written)) == arguments, name
    fields = ", ".join(one.name for one in dataclasses.fields(ShardSizes))
    assert f"`ShardSizes({fields})`" in SECTIONS["ShardSizes"]
