# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns where captured backwards leave the gradients of parameters that they do not give to
autograd: each adds them to places whose addresses its graph keeps.
"""

from collections import Counter
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.zero.unit import HZPUnit

_Place = tuple[str, int]
"""Size of a unit, and which one of that size it is in its layer."""


class CapturedGrads:
    """Units of one size share places, in the dtype of the model, but those of one layer, which are
    needed together. During the backward of a unit they are that unit's; then its parameters have
    what is there, as if autograd had given it to them.

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
        """Around the capture: `main_grad` of the parameters of `units` is where a captured backward
        may add its gradient. captured: at the end, those to which one does."""
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
            found = [index for index, param in enumerate(unit.params) if param in captured]
            if found:
                self._captured[unit] = found
        kept = {self._place_of[unit] for unit in self._captured}
        self._places = {place: memory for place, memory in self._places.items() if place in kept}

    def begin(self, unit: HZPUnit) -> None:
        """The backward of `unit` begins, or reaches it again, which adds to what is there."""
        if unit not in self._captured:
            return
        place = self._place_of[unit]
        if (holder := self._holders.get(place)) is unit:
            return
        if holder is not None:  # its input has no gradient, so nothing says when it is done
            self._displaced[holder] = self._places[place].clone()
        self._holders[place] = unit
        if (displaced := self._displaced.pop(unit, None)) is None:
            self._places[place].zero_()
        else:
            self._places[place].copy_(displaced)

    def take(self, unit: HZPUnit) -> None:
        """The backward of `unit` is done. Its gradients are read before that of another begins."""
        place = self._place_of.get(unit)
        if place is not None and self._holders.get(place) is unit:
            del self._holders[place]
            self.give(unit)
        elif (displaced := self._displaced.pop(unit, None)) is not None:
            self._add(unit, displaced)

    def give(self, unit: HZPUnit) -> None:
        """Give `unit` the gradients that captured backwards leave there: all are written."""
        if unit in self._captured:
            self._add(unit, self._places[self._place_of[unit]])

    def _add(self, unit: HZPUnit, given: torch.Tensor) -> None:
        grads = unit.views_of(given)
        for index in self._captured[unit]:
            param, grad = unit.params[index], grads[index]
            param.grad = grad if param.grad is None else param.grad + grad

    def forget(self) -> None:
        """No backward is under way, or what it has left does not count."""
        self._holders.clear()
        self._displaced.clear()
