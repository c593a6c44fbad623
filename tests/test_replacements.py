# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Names that are replaced, and the way back, on modules and classes made for the test."""

import functools
import itertools
import sys
from types import ModuleType

import pytest
import torch.distributed

from megatron_asynchzp.replacements import Replacements


class Base:
    def inherited(self):
        return "base"


def _original():
    return "original"


@pytest.fixture
def modules(monkeypatch):
    """A package with a function, one module in it and one outside that copied the function."""
    made = {name: ModuleType(name) for name in ("stub_a", "stub_a.reader", "stub_b")}
    for name, module in made.items():
        module.function = _original
        monkeypatch.setitem(sys.modules, name, module)
    return made


def _replace(names: Replacements, module: ModuleType):
    def replacement():
        return "replacement"

    names.replace(module, "function", replacement)
    return replacement


@pytest.mark.parametrize("package, outside", [("stub_a", _original), ("", None)])
def test_copies_are_followed_in_the_package_alone_or_everywhere(modules, package, outside):
    names = Replacements(package)
    replacement = _replace(names, modules["stub_a"])
    names.follow_copies()
    assert modules["stub_a.reader"].function is replacement
    assert modules["stub_b"].function is (outside or replacement)
    names.restore()
    assert all(module.function is _original for module in modules.values())


def test_copies_that_torch_has_of_its_own_names_are_followed():
    original = torch.distributed.destroy_process_group
    names = Replacements()
    names.replace(torch.distributed.distributed_c10d, "destroy_process_group", lambda: "ours")
    names.follow_copies()
    assert torch.distributed.destroy_process_group() == "ours"
    names.restore()
    assert torch.distributed.destroy_process_group is original


def test_a_package_whose_name_begins_alike_is_another_package(modules, monkeypatch):
    other = ModuleType("stub_another")
    other.function = _original
    monkeypatch.setitem(sys.modules, "stub_another", other)
    names = Replacements("stub_a")
    _replace(names, modules["stub_a"])
    names.follow_copies()
    assert other.function is _original
    names.restore()


@pytest.mark.parametrize("order", list(itertools.permutations(["inherited", "own", "static"])))
def test_a_class_gets_back_what_it_held_and_loses_what_it_inherited(order):
    class Owner(Base):
        own = 1
        static = staticmethod(_original)

    before = dict(vars(Owner))
    names = Replacements("stub_a")
    for name in order:
        names.replace(Owner, name, lambda *_: "replaced")
    assert Owner().inherited() == "replaced"
    names.restore()
    assert dict(vars(Owner)) == before and Owner().inherited() == "base"


def test_a_name_replaced_twice_goes_back_to_the_first_object():
    class Owner:
        function = _original

    names = Replacements("stub_a")
    for answer in range(2):
        names.replace(Owner, "function", functools.partial(_original, answer))
    names.restore()
    assert Owner.function is _original


@pytest.mark.parametrize("depth", [1, 2])
def test_a_replacement_that_was_wrapped_is_known_and_stays(modules, depth):
    names = Replacements("stub_a")
    ours = _replace(names, modules["stub_a"])
    assert names.contains(ours) and not names.contains(_original)
    for _ in range(depth):
        inner = modules["stub_a"].function
        modules["stub_a"].function = functools.wraps(inner)(lambda: "theirs")
    assert names.contains(modules["stub_a"].function)
    with pytest.raises(RuntimeError, match="stub_a.function was wrapped"):
        names.restore()
    assert modules["stub_a"].function() == "theirs"
    modules["stub_a"].function = ours
    names.restore()
    assert modules["stub_a"].function is _original
