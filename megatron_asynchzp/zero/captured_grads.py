# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns where captured backwards leave the gradients of parameters that they do not give to
autograd: each adds them to places whose addresses its graph keeps.
"""

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.zero.unit import HZPUnit


class CapturedGrads:
    """Units of one size share places, in the dtype of the model. During the backward of a unit they
    are that unit's; then its parameters have what is there, as if autograd had given it to them.

        main    | zero | B u2 adds | take, reduce u2 | zero | B u1 adds | take, reduce u1 |
    """

    def __init__(self):
        self._places: dict[str, torch.Tensor] = {}
        self._captured: dict[HZPUnit, list[int]] = {}
        self._holders: dict[str, HZPUnit] = {}

    @contextmanager
    def rehearsing(
        self, units: Sequence[HZPUnit], captured: Collection[nn.Parameter]
    ) -> Generator[None]:
        """Around the capture: `main_grad` of the parameters of `units` is where a captured backward
        may add its gradient. captured: at the end, those to which one does."""
        params: list[Any] = [param for unit in units for param in unit.params]
        before = [getattr(param, "main_grad", None) for param in params]
        for unit in units:
            for param, place in zip(unit.params, unit.views_of(self._place_of(unit)), strict=True):
                param.main_grad = place  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            for param, main_grad in zip(params, before, strict=True):
                param.main_grad = main_grad
        for unit in units:
            found = [index for index, param in enumerate(unit.params) if param in captured]
            if found:
                self._captured[unit] = found
        kept = {unit.size_key for unit in self._captured}
        self._places = {key: place for key, place in self._places.items() if key in kept}

    def _place_of(self, unit: HZPUnit) -> torch.Tensor:
        if unit.size_key not in self._places:
            self._places[unit.size_key] = torch.zeros(
                unit.layout.padded_numel, dtype=unit.dtype, device=unit.device
            )
        return self._places[unit.size_key]

    def begin(self, unit: HZPUnit) -> None:
        """The backward of `unit` begins, or reaches it again."""
        holder = self._holders.get(unit.size_key)
        if unit not in self._captured or holder is unit:
            return
        if holder is not None:  # its input has no gradient, so nothing says when it is done
            self.take(holder, is_read_now=False)
        self._holders[unit.size_key] = unit
        self._place_of(unit).zero_()

    def take(self, unit: HZPUnit, is_read_now: bool) -> None:
        """The backward of `unit` is done. is_read_now: whether its gradients are read before that
        of another one begins."""
        if self._holders.get(unit.size_key) is not unit:
            return
        del self._holders[unit.size_key]
        self.give(unit, is_read_now)

    def give(self, unit: HZPUnit, is_read_now: bool) -> None:
        """What was captured has written all gradients of `unit` that it leaves there."""
        if unit not in self._captured:
            return
        place = self._place_of(unit)
        grads = unit.views_of(place if is_read_now else place.clone())
        for index in self._captured[unit]:
            param, grad = unit.params[index], grads[index]
            param.grad = grad if param.grad is None else param.grad + grad

    def forget(self) -> None:
        """No backward is under way, or what it has left does not count."""
        self._holders.clear()
