# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A ledger of replaced attributes: what was there, what is there now, how to go back.

Knows nothing of torch or Megatron; the other files of this folder say what to replace.
"""

import sys
from typing import Any, NamedTuple

_ABSENT = object()


class Entry(NamedTuple):
    """One replaced attribute; `original` is `_ABSENT` when `owner` itself did not hold it."""

    owner: Any
    name: str
    original: Any
    seen: Any  # what getattr returned before: the object that by-name copies hold
    replacement: Any

    def __str__(self) -> str:
        owner = getattr(self.owner, "__qualname__", None) or getattr(
            self.owner, "__name__", type(self.owner).__name__
        )
        module = getattr(self.owner, "__module__", None)
        return f"{module + '.' if module else ''}{owner}.{self.name}"


class Ledger:
    """Replaces attributes and puts every one of them back, by identity.

    Python copies names: after `from torch.cuda import _lazy_call` the importing module keeps the
    old function whatever happens to `torch.cuda`. `follow_copies` walks the modules of a package
    and replaces those copies too; `restore` also walks them, because a module imported while the
    replacements were in place has copied *them*.
    """

    def __init__(self, package: str):
        self._package = package
        self._entries: list[Entry] = []

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def replace(self, owner: Any, name: str, replacement: Any):
        """Set `owner.name`, remembering whether it was owned or inherited."""
        original = vars(owner).get(name, _ABSENT)
        seen = getattr(owner, name, _ABSENT)
        setattr(owner, name, replacement)
        self._entries.append(Entry(owner, name, original, seen, replacement))

    def follow_copies(self) -> int:
        """Replace the by-name copies in the package's loaded modules; returns how many."""
        swaps = {
            id(entry.seen): entry.replacement for entry in self._entries if _is_code(entry.seen)
        }
        copies = self._find_copies(swaps)
        for module, name, replacement in copies:
            self.replace(module, name, replacement)
        return len(copies)

    def restore(self):
        """Undo everything, the newest replacement first."""
        # `_find_copies` lists modules that still hold a replacement after the recorded ones went
        # back: they were imported in between.
        originals = {
            id(entry.replacement): entry.seen
            for entry in self._entries
            if _is_code(entry.replacement) and entry.seen is not _ABSENT
        }
        kept_alive = [entry.replacement for entry in self._entries]
        while self._entries:
            entry = self._entries.pop()
            if entry.original is _ABSENT:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)
        for module, name, original in self._find_copies(originals):
            setattr(module, name, original)
        del kept_alive  # ids stay unique as long as their objects live

    def _find_copies(self, swaps: dict[int, Any]) -> list[tuple[Any, str, Any]]:
        prefix = self._package + "."
        return [
            (module, name, swaps[id(value)])
            for module_name, module in list(sys.modules.items())
            if module is not None and (module_name + ".").startswith(prefix)
            for name, value in list(vars(module).items())
            if id(value) in swaps
        ]


def _is_code(value: Any) -> bool:
    """Whether identity means something: True, 0 or None are shared by everyone."""
    return callable(value) and value is not _ABSENT
