# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The record of a function of Megatron that is replaced, its checks, applying and removing."""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_asynchzp.errors import ConfigurationError, MissingPackage
from megatron_asynchzp.replacements import Replacements
from megatron_asynchzp.versions import MEGATRON, RELEASED, Version

_REMEDY = f'install "megatron-core[training]=={RELEASED}.*"'

# The interpreter has one Megatron, so its replaced functions are state of the process.
_applied = Replacements()


@dataclass(frozen=True)
class Patch:
    """A function that is replaced, in every module that holds it under its name.

    Args:
        target: Module, or class, and name under which Megatron looks the function up when it calls.
        parameters: Names of its parameters, separated by spaces; any others are refused. One that
        older versions lack is followed by the first version with it: "new[0.19]"; one that newer
        versions lack by the last with it: "old[-0.19]". why: What the replacement adds. drop_when:
        When this patch becomes superfluous. call: The replacement, which gets the original before
        the caller's arguments. last: The last version of megatron-core that needs it, or "" for
        all.
    """

    target: str
    parameters: str
    why: str
    drop_when: str
    call: Callable[..., Any]
    last: str = ""

    @property
    def module(self) -> str:
        return self.target.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        return self.target.rpartition(".")[2]

    def parameters_in(self, version: str) -> tuple[str, ...]:
        installed = Version.of(version)

        def is_in(limit: str) -> bool:
            last = limit.removeprefix("-")
            return (
                installed <= Version.of(last) if last != limit else installed >= Version.of(limit)
            )

        split = [text.rstrip("]").partition("[") for text in self.parameters.split()]
        return tuple(name for name, _, limit in split if not limit or is_in(limit))

    def is_needed_in(self, version: str) -> bool:
        return not self.last or Version.of(version) <= Version.of(self.last)

    def make(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self.call(original, *args, **kwargs)

        return replacement


def replaces(
    target: str, parameters: str, *, why: str, drop_when: str, last: str = ""
) -> Callable[[Callable], Patch]:
    """Make a Patch of the function below, whose first parameter is the original."""
    return lambda call: Patch(target, parameters, why, drop_when, call, last)


def found_version() -> str:
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise MissingPackage("megatron", "a Megatron script") from error
    if Version.of(info.__version__) < Version.of(MEGATRON[0]):
        raise ConfigurationError(
            f"megatron-core {info.__version__} was found at {info.__file__}, and this version of "
            f"megatron_asynchzp needs {MEGATRON[0]} or later; {_REMEDY}"
        )
    return info.__version__


def mismatch(symbol: str, fact: str) -> ConfigurationError:
    """Return the error for a Megatron whose `symbol` differs; `fact` completes the sentence."""
    info = importlib.import_module("megatron.core.package_info")
    return ConfigurationError(
        f"{symbol} {fact}; megatron-core {info.__version__} was found at {info.__file__}, "
        f"and this version of megatron_asynchzp is made for {', '.join(MEGATRON)}; {_REMEDY}"
    )


def _load(patch: Patch) -> tuple[ModuleType | type, Callable]:
    above, _, name = patch.module.rpartition(".")
    is_class = name[:1].isupper()
    try:
        module: Any = importlib.import_module(above if is_class else patch.module)
    except ModuleNotFoundError as error:
        if error.name and not patch.module.startswith(error.name):
            raise  # something that Megatron needs is missing: its own message is the better one
        raise mismatch(patch.target, "does not exist") from error
    module = getattr(module, name, None) if is_class else module
    if patch.attribute not in getattr(module, "__dict__", ()):  # nor inherited
        raise mismatch(patch.target, "does not exist")
    return module, getattr(module, patch.attribute)


def _check_signature(patch: Patch, original: Callable) -> None:
    names = tuple(inspect.signature(original).parameters)
    wanted = patch.parameters_in(found_version())
    if names != wanted:
        raise mismatch(
            patch.target, f"takes ({', '.join(names)}), not ({', '.join(wanted)}) as expected"
        )


def apply_patches(patches: Sequence[Patch]) -> None:
    """Apply the patches that are not applied yet, or none if one does not fit."""
    version = found_version()
    pending = []
    for patch in patches:
        if not patch.is_needed_in(version):
            continue
        module, current = _load(patch)
        if not _applied.contains(current):
            _check_signature(patch, current)
            pending.append((module, patch, current))
    for module, patch, original in pending:
        _applied.replace(module, patch.attribute, patch.make(original))
    if pending:
        _applied.follow_copies()


def remove_patches() -> None:
    """Restore each original and copies of it; RuntimeError if a replacement was wrapped since."""
    _applied.restore()
