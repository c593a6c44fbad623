# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Boxes make up the tensor that was cut into them, and flags of what changed with it."""

from itertools import pairwise, product

import pytest
import torch

from megatron_asynchzp.hf.held_runs import Address, HeldRun
from megatron_asynchzp.hf.pieces import Piece, join

LAYERS = 3


def cut(size: tuple[int, ...], cuts: list[list[int]], layer: int) -> list[HeldRun]:
    """The boxes of a layer's tensor between the `cuts` of each dim."""
    return [
        HeldRun(
            "w",
            (LAYERS, *size),
            (layer, *(start for start, _ in box)),
            (1, *(stop - start for start, stop in box)),
            torch.bfloat16,
            (0,),
            Address(0, 0, 0, 0),
            (0, 0),
        )
        for box in product(*(pairwise(of_dim) for of_dim in cuts))
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
    runs, pieces = cut(size, cuts, layer=1), {}
    for run in runs:
        box = tuple(
            slice(start, start + length)
            for start, length in zip(run.offset[1:], run.shape[1:], strict=True)
        )
        flags = None if changed is None else changed[box].reshape(-1)
        pieces[run] = Piece.of(whole[box].reshape(-1), flags)
        sent = sum(tensor.nbytes for tensor in pieces[run].tensors())
        shorter = run.numel * 2 if flags is None else int(flags.sum()) * 6
        assert sent == min(run.numel * 2, shorter)
        copy = Piece.to_receive(run.numel, whole.dtype, whole.device, pieces[run].count)
        assert [one.shape for one in copy.tensors()] == [o.shape for o in pieces[run].tensors()]
    joined, came = join(runs, 1, torch.Size(size), pieces)
    assert not pieces
    if came is None:
        assert torch.equal(joined, whole)
        return
    assert changed is not None and not (changed & ~came).any()
    assert torch.equal(joined[came], whole[came]) and not joined[~came].any()
    if share in (0.0, 0.01):
        assert torch.equal(came, changed)
