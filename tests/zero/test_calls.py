# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""When backward has passed a call of a module: with the gradient of its inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_asynchzp.engine.zero.calls import _Call


class Passed:
    """Records what backward reaches."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def before_backward(self, units: list) -> None:
        self.seen.append("begins")

    def after_backward(self, units: list) -> None:
        self.seen.append("ends")


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 1], ids=["leaf", "result"])
@pytest.mark.parametrize("give", [
    lambda x: ((x, 3, x), {}), lambda x: ((), {"a": x, "b": None}), lambda x: ((x,), {"a": x}),
])  # fmt: skip
def test_backward_has_passed_a_call_once_when_an_input_has_its_gradient(
    make: Callable[[torch.Tensor], torch.Tensor], give: Callable[[torch.Tensor], tuple]
):
    """One view stands for a tensor that is given twice, as a module may compare them."""
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    given = make(leaf)
    runtime: Any = Passed()
    call = _Call(runtime, [])
    for _ in range(2):
        args, kwargs = call.watch_inputs(*give(given))
        values, before = (*args, *kwargs.values()), give(given)
        known = [value for value in values if isinstance(value, torch.Tensor)]
        assert len(args) == len(before[0]) and kwargs.keys() == before[1].keys()
        assert len({id(value) for value in known}) == 1 and known[0].equal(leaf)
        assert {value for value in values if not isinstance(value, torch.Tensor)} <= {3, None}
        output = sum(one * 3 for one in known)
        call.watch_output(output)
        runtime.seen.clear()
        leaf.grad = None
        output.sum().backward(retain_graph=True)
        assert runtime.seen == ["begins", "ends"]
        assert leaf.grad is not None and leaf.grad.tolist() == [3.0 * len(known)] * 2
