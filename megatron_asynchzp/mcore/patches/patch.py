# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how a function of Megatron is replaced and put back, and what is checked before. Must not
know which functions, or by what.
"""

import functools
import importlib
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

EXPECTED_VERSION = "0.19."

# A replacement carries itself under this name. functools.wraps copies attributes, so only a
# function whose mark is the function itself is ours, and not somebody's wrapper around it.
_MARK = "_asynchzp_replacement"


def run_args(flag: str = "use_asynchzp") -> Namespace | None:
    """Megatron's global arguments if `flag` was given to this run, else None."""
    from megatron.training import get_args

    try:
        args = get_args()
    except AssertionError:  # a library user who never parsed arguments
        return None
    return args if getattr(args, flag, False) else None


class IncompatibleMegatron(RuntimeError):
    """The Megatron that was found is not one that this version can patch."""


@dataclass(frozen=True)
class Patch:
    """One function of Megatron that is replaced.

    module, attribute: where Megatron looks the function up when it calls it.
    parameters: names of its parameters in megatron-core 0.19; anything else is refused.
    make: takes the original, returns the replacement (same parameters).
    why: what the replacement adds; drop_when: what makes this patch superfluous.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]
    make: Callable[[Callable], Callable]
    why: str
    drop_when: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.attribute}"


def check_version() -> None:
    """Raise IncompatibleMegatron unless megatron-core 0.19 with megatron.training is there."""
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise IncompatibleMegatron(
            "megatron-core is not installed; install megatron-core[training]==0.19.2"
        ) from error
    if not info.__version__.startswith(EXPECTED_VERSION):
        raise IncompatibleMegatron(
            f"megatron-core {info.__version__} was found at {info.__file__}, but this version of "
            f"megatron_asynchzp is made for megatron-core {EXPECTED_VERSION}x; "
            "install megatron-core[training]==0.19.2"
        )


def _mismatch(patch: Patch, found: str) -> IncompatibleMegatron:
    info = importlib.import_module("megatron.core.package_info")
    return IncompatibleMegatron(
        f"{patch.target} {found}; this version of megatron_asynchzp is made for megatron-core "
        f"{EXPECTED_VERSION}x and found {info.__version__}"
    )


def _find_replacement(function: Callable) -> Callable | None:
    """Our replacement, if `function` is it or wraps it."""
    while function is not None:
        if getattr(function, _MARK, None) is function:
            return function
        function = getattr(function, "__wrapped__", None)
    return None


def _load(patch: Patch) -> tuple[ModuleType, Callable]:
    try:
        module = importlib.import_module(patch.module)
    except ModuleNotFoundError as error:
        if error.name and not patch.module.startswith(error.name):
            raise  # something that Megatron needs is missing: its own message is the better one
        raise _mismatch(patch, "does not exist") from error
    if not hasattr(module, patch.attribute):
        raise _mismatch(patch, "does not exist")
    return module, getattr(module, patch.attribute)


def _check_signature(patch: Patch, original: Callable) -> None:
    found = tuple(inspect.signature(original).parameters)
    if found != patch.parameters:
        raise _mismatch(
            patch, f"takes ({', '.join(found)}), not ({', '.join(patch.parameters)}) as expected"
        )


def _replace_everywhere(pairs: Sequence[tuple[Callable, Callable]]) -> None:
    """Set every module-level name that is the first of a pair to the second, as `from module import
    f` leaves copies. All pairs at once: to look through every module takes long."""
    new_by_id = {id(old): new for old, new in pairs}
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) else {}
        for name, value in list(names.items()):
            if id(value) in new_by_id:
                setattr(module, name, new_by_id[id(value)])


def apply_patches(patches: Sequence[Patch]) -> None:
    """Apply what is not applied yet. Nothing is changed unless every patch fits.

    Raises IncompatibleMegatron naming the symbol, the version expected and the version found.
    """
    check_version()
    pending = []
    for patch in patches:
        _, current = _load(patch)
        if _find_replacement(current) is None:
            _check_signature(patch, current)
            pending.append((patch, current))
    pairs = []
    for patch, original in pending:
        replacement = functools.wraps(original)(patch.make(original))
        setattr(replacement, _MARK, replacement)
        pairs.append((original, replacement))
    _replace_everywhere(pairs)


def remove_patches(patches: Sequence[Patch]) -> None:
    """Put every original back, also where a copy was imported after patching."""
    pairs = []
    for patch in patches:
        _, current = _load(patch)
        replacement = _find_replacement(current)
        if replacement is None:
            continue
        if replacement is not current:
            raise RuntimeError(f"{patch.target} was wrapped again after it was patched; undo that")
        pairs.append((replacement, replacement.__wrapped__))
    _replace_everywhere(pairs)
