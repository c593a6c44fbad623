# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the places where captured backwards leave gradients that they do not give to autograd."""

from collections import Counter
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.engine.zero.unit import HZPUnit

_Place = tuple[str, int]
"""Size of a unit, and its number among those of that size in its layer."""


class CapturedGrads:
    """Places, in the model's dtype, which units of equal size share unless they share a layer.

    After its backward a unit gets these gradients as if autograd had given them.

        main    | zero | B u2 adds | take, reduce u2 | zero | B u1 adds | take, reduce u1 |
    """

    def __init__(self):
        self._places: dict[_Place, torch.Tensor] = {}
        self._place_of: dict[HZPUnit, _Place] = {}
        self._captured: dict[HZPUnit, list[int]] = {}
        self._holders: dict[_Place, HZPUnit] = {}
        self._displaced: dict[HZPUnit, torch.Tensor] = {}

    @contextmanager
    def rehearsing(
        self, units: Sequence[HZPUnit], captured: Collection[nn.Parameter]
    ) -> Generator[None]:
        """Wrap the capture; at its end `captured` holds the parameters to which a backward adds."""
        params = [param for unit in units for param in unit.params]
        before: list[Any] = [(param, getattr(param, "main_grad", None)) for param in params]
        in_layer = Counter[tuple[str, str]]()
        for unit in units:
            kind = (unit.layer, unit.size_key)
            place = self._place_of[unit] = (unit.size_key, in_layer[kind])
            in_layer[kind] += 1
            if place not in self._places:
                options: Any = {"dtype": unit.dtype, "device": unit.device}
                self._places[place] = torch.zeros(unit.layout.padded_numel, **options)
            for param, grad in zip(unit.params, unit.views_of(self._places[place]), strict=True):
                param.main_grad = grad  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            for param, main_grad in before:
                param.main_grad = main_grad
        for unit in units:
            indices = [index for index, param in enumerate(unit.params) if param in captured]
            if indices:
                self._captured[unit] = indices
        kept = {self._place_of[unit] for unit in self._captured}
        self._places = {place: memory for place, memory in self._places.items() if place in kept}

    def begin(self, unit: HZPUnit) -> None:
        """Begin or continue the backward of `unit`, which adds to its places."""
        if unit not in self._captured:
            return
        place = self._place_of[unit]
        if (holder := self._holders.get(place)) is unit:
            return
        if holder is not None:  # its input has no gradient, so no hook has ended its backward
            self._displaced[holder] = self._places[place].clone()
        self._holders[place] = unit
        if (displaced := self._displaced.pop(unit, None)) is None:
            self._places[place].zero_()
        else:
            self._places[place].copy_(displaced)

    def take(self, unit: HZPUnit) -> None:
        """Read the gradients of `unit` after its backward, before another unit uses its place."""
        place = self._place_of.get(unit)
        if place is not None and self._holders.get(place) is unit:
            del self._holders[place]
            self.give(unit)
        elif (displaced := self._displaced.pop(unit, None)) is not None:
            self._add(unit, displaced)

    def give(self, unit: HZPUnit) -> None:
        """Give the parameters of `unit` the gradients that captured backwards left in its place."""
        if unit in self._captured:
            self._add(unit, self._places[self._place_of[unit]])

    def _add(self, unit: HZPUnit, given: torch.Tensor) -> None:
        grads = unit.views_of(given)
        for index in self._captured[unit]:
            param, grad = unit.params[index], grads[index]
            param.grad = grad if param.grad is None else param.grad + grad

    def forget(self) -> None:
        """Forget gradients of past backwards, which do not count."""
        self._holders.clear()
        self._displaced.clear()
