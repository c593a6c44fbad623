# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Changes of a parameter, and how a copy of the model applies them. Needs torch alone."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_asynchzp.errors import ConfigurationError


@dataclass(frozen=True)
class WeightDelta:
    """New values of some elements of a parameter, or of all elements if that is shorter."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    # 1-D, int32 (int64 from 2^31 elements on), ascending, of the row-major elements; None if
    # `values` has them all
    indices: torch.Tensor | None
    values: torch.Tensor  # 1-D, in the dtype of the model

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)

    @classmethod
    def of(cls, name: str, whole: torch.Tensor, changed: torch.Tensor | None) -> "WeightDelta":
        """Copy the `changed` (bool, None for all) elements of the new parameter `whole`."""
        flat, shape = whole.reshape(-1), tuple(whole.shape)
        if changed is not None:
            index_dtype = torch.int32 if flat.numel() < 2**31 else torch.int64
            num_changed = int(changed.count_nonzero())
            if num_changed * (index_dtype.itemsize + flat.itemsize) < flat.nbytes:
                indices = changed.view(-1).nonzero().view(-1)
                return cls(name, shape, indices.to(index_dtype), flat[indices])
        return cls(name, shape, None, flat.clone())


@torch.no_grad()
def apply_delta(weights: Mapping[str, torch.Tensor], delta: WeightDelta) -> None:
    """Write the new values into weights[delta.name], on any device.

    That weight then has the bits of the trained model if it had them when the mark was set. Raises
    ConfigurationError if that name is missing, or its shape or dtype differs.
    """
    target = weights.get(delta.name)
    if target is None:
        raise ConfigurationError(f"{delta.name}: there is a delta of it, but no such weight here")
    actual, expected = (tuple(target.shape), target.dtype), (delta.shape, delta.values.dtype)
    if actual != expected:
        raise ConfigurationError(
            f"{delta.name}: the weight here is of shape {actual[0]} in {actual[1]}, its delta of "
            f"{expected[0]} in {expected[1]}; take the delta from the same model in the same dtype"
        )
    values = delta.values.to(target.device)
    if delta.indices is None:
        target.copy_(values.view(delta.shape))
    else:
        target.put_(delta.indices.to(target.device, torch.int64), values)
