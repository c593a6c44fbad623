# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which tensors that autograd saved are views of a unit's gathered parameters."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn, cast
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError

# Private to torch: its public form is a context manager, and these are set by two hooks.
_autograd: Any = cast(Any, torch._C)._autograd  # pyright: ignore[reportPrivateUsage]
_PUSH: Any = _autograd._push_saved_tensors_default_hooks
_POP: Any = _autograd._pop_saved_tensors_default_hooks
_DISABLE = torch.autograd.graph.disable_saved_tensors_hooks

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True, eq=False)
class SavedView:
    """A strided view of a unit's full parameters, without their memory."""

    views: "SavedViews"  # packed it
    unit: HZPUnit
    version: int | None  # of the parameters; None if any will do
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedViews:
    """Saved-tensor hooks around the forward of units (law 5).

    [Note: saved views] nn.Linear saves `weight.t()`, a view of the full parameters, which are
    resharded after forward. The view would keep their memory alive or, if it is reused, read
    another unit's parameters: a silent wrong gradient. Packed as (unit, offset, shape, stride) it
    costs nothing and unpacks from the parameters gathered for backward.

    The hooks cost microseconds for each tensor. Layers of Megatron and Transformer Engine save the
    parameter itself, which needs no hook. So if autograd saves no view of a unit in a step, the
    unit has no hooks until a view is found in memory to be reused ([Note: views that outlive the
    unit]). That needs backwards that begin at a known output (may_go_without).

    [Note: hooks of others] Torch applies only the innermost hooks. If a program has its own hooks
    (such as save_on_cpu), the engine pushes joined hooks: they pack views of a unit, and pass every
    other tensor to the program's. The program's hooks may begin and end around a unit, within it or
    in a recomputation, in any order, so each side pops only its own.
    """

    # All living instances: joined hooks look for views of their units.
    all: ClassVar[tuple[ref["SavedViews"], ...]] = ()

    def __init__(self, on_missing: Callable[[HZPUnit], None], may_go_without: bool = True):
        self._on_missing, self._may_go_without = on_missing, may_go_without
        self._units_by_storage: dict[int, HZPUnit] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # all storages of gathered units
        self._watched: set[HZPUnit] = set()  # gathered for a forward of this step, under hooks
        self._with_views: set[HZPUnit] = set()  # a view of their parameters was found
        self._without_views: set[HZPUnit] = set()
        if not SavedViews.all:
            _autograd._push_saved_tensors_default_hooks = _push_theirs
            _autograd._pop_saved_tensors_default_hooks = _pop_theirs
            torch.autograd.graph.disable_saved_tensors_hooks = _disable_within_a_unit
        alive = (views for views in SavedViews.all if views() is not None)
        SavedViews.all = (*alive, ref(self))

    def begin_step(self, viewed: set[HZPUnit]) -> None:
        """Begin a step; views of each unit in `viewed` outlived their unit in the last one."""
        self._with_views |= viewed
        if self._may_go_without:
            self._without_views = (self._without_views | self._watched) - self._with_views
        self._watched.clear()
        alive = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        self._storages = alive

    def are_needed_by(self, units: Iterable[HZPUnit]) -> bool:
        if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            for unit in units:
                if not unit.is_always_unsharded:
                    raise ConfigurationError(
                        f"{unit.name} is called within torch.func's grad, vjp, jacrev or hessian, "
                        "whose backward does not gather shards. Call these within its forward, or "
                        "use torch.autograd.grad or torch.autograd.functional.jacobian"
                    )
            return False
        sharded = (unit for unit in units if not unit.is_always_unsharded)
        return not self._without_views.issuperset(sharded)

    def track(self, unit: HZPUnit) -> None:
        storage = unit.full_param_storage.untyped_storage()
        self._units_by_storage[storage.data_ptr()] = unit
        if (key := _number_of(storage)) not in self._storages:
            self._storages[key] = StorageWeakRef(storage)
        if unit not in self._without_views and torch.is_grad_enabled():
            self._watched.add(unit)

    def push(self) -> None:
        """Let autograd save through this object until the matching `pop`."""
        top = _top_hooks()
        below = getattr(top[0], "__self__", None) if top else self
        hooks: SavedViews | _JoinedHooks = self
        if isinstance(below, _JoinedHooks):
            hooks = _JoinedHooks(below.theirs, self)
        elif below is not self:  # of another model, or of a checkpoint
            hooks = _JoinedHooks(None if isinstance(below, SavedViews) else top, self)
        _PUSH(hooks.pack, hooks.unpack)

    def pop(self) -> None:
        _pop_latest(of_a_unit=True)

    def unit_of(self, tensor: torch.Tensor) -> HZPUnit | None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None  # a wrapper subclass has no storage of its own
        if tensor.layout is not torch.strided:
            return None
        try:
            pointer = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # tensors of torch.func have no storage, but still keep memory
            return None
        unit = self._units_by_storage.get(pointer)
        return unit if unit is not None and unit.is_gathered_at(pointer) else None

    def is_view(self, tensor: torch.Tensor) -> bool:
        if self.unit_of(tensor) is not None:
            return True
        try:
            return _number_of(tensor.untyped_storage()) in self._storages
        except (NotImplementedError, RuntimeError):
            return False

    def pack(self, tensor: torch.Tensor, checks_version: bool = True) -> "_Kept | SavedView":
        """Return what autograd keeps; with `checks_version`, `unpack` refuses a later write."""
        unit = self.unit_of(tensor)
        if unit is None or unit.is_always_unsharded:
            return _Kept.of(tensor, checks_version)
        if type(tensor) is torch.Tensor:
            self._with_views.add(unit)
        offset = int(tensor.storage_offset())
        form = tensor.dtype, tensor.shape, tensor.stride(), offset
        return SavedView(
            self, unit, unit.sent_record.versions[0] if checks_version else None, *form
        )

    def unpack(self, saved: "_Kept | SavedView") -> torch.Tensor:
        if isinstance(saved, _Kept):
            return saved.unwritten()
        if saved.version not in (None, version := saved.unit.sent_record.versions[0]):
            _refuse_written(f"parameters of {saved.unit.name}", version, saved.version)
        if not saved.unit.is_unsharded:
            self._with_views.add(saved.unit)  # nothing else would gather it in time
        self._on_missing(saved.unit)
        full = saved.unit.full_param_storage
        if saved.dtype != full.dtype:
            full = full.view(saved.dtype)
        return full.as_strided(saved.shape, saved.stride, saved.offset)


class _Kept(NamedTuple):
    """A tensor that is no view of a unit, and its version, which torch ignores under hooks."""

    tensor: torch.Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor, checks_version: bool = True) -> "_Kept":
        # [Note: saved outputs] A node that saves its own output through hooks would hold a tensor
        # that holds the node, a cycle that is never freed if backward never runs. Autograd adds the
        # node again to the unpacked tensor.
        version = tensor._version if checks_version else None
        return cls(tensor if tensor.grad_fn is None else tensor.detach(), version)

    def unwritten(self) -> torch.Tensor:
        """Return the tensor; raise RuntimeError, in torch's words, if code wrote to it since."""
        if self.version not in (None, self.tensor._version):
            title = f"{self.tensor.type()} {list(self.tensor.shape)}"
            _refuse_written(title, self.tensor._version, self.version)
        return self.tensor


def _refuse_written(title: str, version: int, expected: int | None) -> NoReturn:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{title}] is at version {version}; expected version {expected} instead."
    )


class _Theirs(NamedTuple):
    packed: Any


class _JoinedHooks:
    """The hooks of all engines for views of their units, and of the program for other tensors."""

    def __init__(self, theirs: Hooks | None, unit_views: SavedViews | None = None):
        # The program's; None: tensors are kept as they are (_Kept).
        self.theirs = theirs
        # Pushed these hooks for a unit; None if the program pushed them.
        self.unit_views = unit_views

    def pack(self, tensor: torch.Tensor) -> Any:
        for known in SavedViews.all:
            if (views := known()) is not None and views.is_view(tensor):
                # A checkpoint recomputes from the parameters of that time, written or not.
                is_kept = (
                    self.theirs is None or self.theirs[0].__module__ != "torch.utils.checkpoint"
                )
                return views.pack(tensor, checks_version=is_kept)
        return _Kept.of(tensor) if self.theirs is None else _Theirs(self.theirs[0](tensor))

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Theirs):
            assert self.theirs is not None
            return self.theirs[1](saved.packed)
        return saved.views.unpack(saved) if isinstance(saved, SavedView) else saved.unwritten()


def _number_of(storage: Any) -> int:
    """Return a storage's number, unique while the storage or a weak reference to it exists."""
    return storage._cdata


def _top_hooks() -> Any:
    return _autograd._top_saved_tensors_default_hooks(False)


def _views_of(hooks: Hooks) -> SavedViews | None:
    """Return the SavedViews that pushed `hooks` for a unit, None for hooks of the program."""
    owner = getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, SavedViews) else getattr(owner, "unit_views", None)


def _pop_latest(of_a_unit: bool) -> None:
    """Pop the latest hooks of units, or of the program, and push those above them again."""
    above: list[Hooks] = []
    while (top := _top_hooks()) is not None and (_views_of(top) is not None) != of_a_unit:
        above.append(top)
        _POP()
    try:
        _POP()
    finally:
        for hooks in reversed(above):
            if (views := _views_of(hooks)) is None:
                _PUSH(*hooks)
            else:
                views.push()


def _push_theirs(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    if not isinstance(pack, torch.fx.GraphModule):  # a compiler looks for graphs as hooks
        joined = _JoinedHooks((pack, unpack))
        pack, unpack = joined.pack, joined.unpack
    _PUSH(pack, unpack)


def _pop_theirs() -> None:
    _pop_latest(of_a_unit=False)


@contextmanager
def _disable_within_a_unit(message: str) -> Generator[None]:
    """Let torch.func run within a unit: pop the engine's hooks meanwhile; replaces torch's."""
    ours: list[SavedViews] = []
    while (top := _top_hooks()) is not None and isinstance(
        owner := getattr(top[0], "__self__", None), SavedViews
    ):
        ours.append(owner)
        _POP()
    try:
        with _DISABLE(message):
            yield
    finally:
        for views in reversed(ours):
            views.push()
