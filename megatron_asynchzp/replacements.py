# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces names of Megatron and torch, for the adapter and the CPU platform, and restores them."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

_ABSENT = object()
# They copy no name of Megatron's. Looking at their names, most of all, copies a fork's pages.
_OTHERS = "cuda huggingface_hub mpmath networkx numpy omegaconf pydantic rich sympy tensorboard"
_CANNOT_COPY = {*sys.stdlib_module_names, *_OTHERS.split(), "torch", "transformers", "wandb"}


class Replaced(NamedTuple):
    """A replaced attribute; `original` is `_ABSENT` if `owner` only inherited it."""

    owner: Any
    name: str
    original: Any
    seen: Any  # what getattr returned before: the object that copies by name hold
    replacement: Any

    def __str__(self) -> str:
        owner = getattr(self.owner, "__qualname__", None) or getattr(
            self.owner, "__name__", type(self.owner).__name__
        )
        module = getattr(self.owner, "__module__", None)
        return f"{module + '.' if module else ''}{owner}.{self.name}"


class Replacements:
    """Replaces attributes of modules and classes, and restores every one by identity.

    After `from package import name` the importing module keeps the old object: `follow_copies`
    replaces such copies too. `restore` also finds copies that were made of the replacements.

    Args:
        package: where copies are searched; "" means every module that may import Megatron.
    """

    def __init__(self, package: str = ""):
        self._prefix = package + "." if package else ""
        self._entries: list[Replaced] = []
        self._followed: dict[str, ModuleType] = {}  # where copies were replaced already

    @property
    def entries(self) -> tuple[Replaced, ...]:
        return tuple(self._entries)

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        original = vars(owner).get(name, _ABSENT)
        seen = getattr(owner, name, _ABSENT)
        setattr(owner, name, replacement)
        self._entries.append(Replaced(owner, name, original, seen, replacement))

    def contains(self, function: Any) -> bool:
        """Return whether `function` is a replacement, or wraps one (functools.wraps)."""
        ours = {id(entry.replacement) for entry in self._entries}
        return id(function) in ours or any(id(inner) in ours for inner in _wrapped_by(function))

    def follow_copies(self) -> int:
        """Replace the copies by name in loaded modules; return how many there were."""
        # Only callables: True, 0 and None are shared by everyone.
        swaps = [(e.seen, e.replacement) for e in self._entries if callable(e.seen)]
        self._followed.clear()
        copies = self._find_copies(swaps)
        for module, name, replacement in copies:
            self.replace(module, name, replacement)
        self._followed = dict(sys.modules)
        return len(copies)

    def restore(self) -> None:
        """Undo everything, the newest replacement first.

        Raises:
            RuntimeError: a replacement was wrapped since; nothing is undone then.
        """
        for entry in self._entries:
            now = getattr(entry.owner, entry.name, None)
            if any(inner is entry.replacement for inner in _wrapped_by(now)):
                raise RuntimeError(f"{entry} was wrapped after it was replaced; undo that first")
        originals = [
            (e.replacement, e.seen)
            for e in self._entries
            if callable(e.replacement) and e.seen is not _ABSENT
        ]
        while self._entries:
            entry = self._entries.pop()
            if entry.original is _ABSENT:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)
        for module, name, original in self._find_copies(originals):
            setattr(module, name, original)
        self._followed.clear()

    def _find_copies(self, swaps: list[tuple[Any, Any]]) -> list[tuple[ModuleType, str, Any]]:
        """Find the names that hold the first object of a pair, each with the second.

        Few modules are examined: filelock has an audit hook, which Python calls at every id().
        """
        if not swaps:
            return []
        types = {type(old) for old, _ in swaps}
        news = {id(old): new for old, new in swaps}
        names = {getattr(old, "__name__", None) for old, _ in swaps}
        places = (str(getattr(function, "__module__", "")) for swap in swaps for function in swap)
        own = {(*module.split(".")[:2],) for module in places}
        return [
            (module, name, news[id(value)])
            for module_name, module in list(sys.modules.items())
            if isinstance(module, ModuleType) and (module_name + ".").startswith(self._prefix)
            if (place := (*module_name.split(".")[:2],))[0] not in _CANNOT_COPY or place in own
            if self._followed.get(module_name) is not module
            for name, value in list(vars(module).items())
            if type(value) in types and getattr(value, "__name__", None) in names
            if id(value) in news
        ]


def _wrapped_by(function: Any) -> Iterator[Any]:
    """Yield the functions that `function` wraps (functools.wraps), the outermost first."""
    while (function := getattr(function, "__wrapped__", None)) is not None:
        yield function
