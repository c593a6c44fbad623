# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The page of public names has each of them, with every argument, and none that is not there."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import megatron_asynchzp
from megatron_asynchzp import ScheduleConfig, ShardedModel, ShardSizes, shard, stream_weights

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}


def first_column(section: str) -> set[str]:
    """Names in the first column of a section's table, without their arguments."""
    rows = re.findall(r"^\| (`.*?) \|", SECTIONS[section], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)(?:\(.*?\))?`", row)}


def test_the_page_has_every_public_name():
    assert set(megatron_asynchzp.__all__) <= set(SECTIONS)


FUNCTIONS = ("shard", "stream_weights", "mark_weights", "forget_mark", "stream_changes", "save_hf")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_page_has_every_argument_of_a_function_with_its_default(function):
    parameters = inspect.signature(getattr(megatron_asynchzp, function)).parameters
    (line,) = re.findall(rf"`{function}\((.*?)\)`\n", SECTIONS[function])
    names = [word.strip().partition("=")[0] for word in line.split(",")]
    assert [name for name in names if name != "*"] == list(parameters)
    for name, parameter in parameters.items():
        is_optional = parameter.default is not inspect.Parameter.empty
        assert (f"{name}=" in line) == is_optional, name


@pytest.mark.parametrize("function", [shard, stream_weights])
def test_the_page_explains_every_argument(function):
    assert first_column(function.__name__) == set(inspect.signature(function).parameters)


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
