# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns what torch's reduction operators do to two pieces and to a result."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# fmt: off
_COMBINE: dict[str, Callable] = {
    "SUM": torch.add, "AVG": torch.add, "PREMUL_SUM": torch.add, "PRODUCT": torch.mul,
    "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}
# fmt: on


class Reduction(NamedTuple):
    """A reduction operator.

    combine(a, b, out=): two pieces into one; factor: by which every input is multiplied first.
    """

    name: str
    combine: Callable[..., torch.Tensor]
    factor: float | torch.Tensor | None = None

    def prescaled(self, flat: torch.Tensor) -> torch.Tensor:
        """An own input, ready to be combined: the same tensor where nothing is to be done."""
        return flat if self.factor is None else flat * self.factor

    def finish(self, result: torch.Tensor, size: int) -> None:
        """The result of combining `size` pieces is complete."""
        if self.name == "AVG":
            result.div_(size)


def reduction_of(options: Any, tensors: Sequence[torch.Tensor]) -> Reduction:
    """The operator of torch's options for a collective (None: SUM), where it suits the tensors."""
    op: Any = dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)
    name = getattr(op, "op", op).name
    for tensor in tensors:
        if name == "AVG" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"AVG of {tensor.dtype} has no meaning: use SUM and divide")
    return Reduction(name, _COMBINE[name], op.factor if name == "PREMUL_SUM" else None)
