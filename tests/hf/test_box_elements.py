# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Boxes make up the tensor that was cut into them, and flags of what changed with it."""

from itertools import pairwise, product

import pytest
import torch

from megatron_asynchzp.hf.box_elements import BoxElements, join
from megatron_asynchzp.hf.held_boxes import Address, HeldBox

LAYERS = 3


def cut(size: tuple[int, ...], cuts: list[list[int]], layer: int) -> list[HeldBox]:
    """The boxes of a layer's tensor between the `cuts` of each dim."""
    return [
        HeldBox(
            "w",
            (LAYERS, *size),
            (layer, *(start for start, _ in part)),
            (1, *(stop - start for start, stop in part)),
            torch.bfloat16,
            (0,),
            Address(0, 0, 0, 0),
            (0, 0),
        )
        for part in product(*(pairwise(of_dim) for of_dim in cuts))
    ]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.9, None])
@pytest.mark.parametrize(
    "size, cuts",
    [
        ((12, 10), [[0, 12], [0, 10]]),
        ((12, 10), [[0, 3, 6, 9, 12], [0, 10]]),
        ((12, 10), [[0, 12], [0, 5, 10]]),
        ((12, 10), [[0, 4, 12], [0, 7, 10]]),
        ((12,), [[0, 6, 12]]),
    ],
    ids=str,
)
def test_boxes_make_up_the_tensor_that_was_cut_into_them(size, cuts, share):
    """share: of the elements that changed, None where that is not asked for."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(size, generator=generator).to(torch.bfloat16)
    changed = None if share is None else torch.rand(size, generator=generator) < share
    boxes, elements = cut(size, cuts, layer=1), {}
    for box in boxes:
        part = tuple(
            slice(start, start + length)
            for start, length in zip(box.offset[1:], box.shape[1:], strict=True)
        )
        flags = None if changed is None else changed[part].reshape(-1)
        elements[box] = BoxElements.of(whole[part].reshape(-1), flags)
        sent = sum(tensor.nbytes for tensor in elements[box].tensors())
        shorter = box.numel * 2 if flags is None else int(flags.sum()) * 6
        assert sent == min(box.numel * 2, shorter)
        copy = BoxElements.to_receive(box.numel, whole.dtype, whole.device, elements[box].count)
        assert [one.shape for one in copy.tensors()] == [o.shape for o in elements[box].tensors()]
    joined, came = join(elements, boxes, 1, torch.Size(size))
    assert not elements
    if came is None:
        assert torch.equal(joined, whole)
        return
    assert changed is not None and not (changed & ~came).any()
    assert torch.equal(joined[came], whole[came]) and not joined[~came].any()
    if share in (0.0, 0.01):
        assert torch.equal(came, changed)
