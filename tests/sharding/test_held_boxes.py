# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Of what all ranks describe each box counts once, and together they are the whole of each
tensor."""

import random

import pytest
import torch

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.held_boxes import Address, HeldBox, distinct_boxes


def box(offset: tuple[int, ...], holders: tuple[int, ...], copy: tuple[int, int] = (0, 0)):
    """A row of an expert's matrix of 2 rows, of 3 experts in one layer."""
    size, shape = (1, 3, 2, 5), (1, 1, 1, 5)
    return HeldBox("w", size, offset, shape, torch.float32, holders, Address(0, 0, 0, 0), copy)


BOXES = [box((0, expert, row, 0), (expert, expert + 3)) for expert in range(3) for row in range(2)]


def test_the_first_copy_of_a_box_counts_whoever_describes_it_first():
    copies = [box(one.offset, (9,), copy) for one in BOXES for copy in ((0, 1), (1, 0))]
    for seed in range(5):
        described = random.Random(seed).sample([*BOXES, *copies], len(BOXES) + len(copies))
        assert sorted(distinct_boxes(described)["w"]) == BOXES


def test_a_tensor_of_which_nobody_describes_a_part_is_refused():
    for missing in BOXES:
        with pytest.raises(ConfigurationError, match="w: the ranks hold 25 of its 30 elements"):
            distinct_boxes(one for one in BOXES if one is not missing)


def test_ranks_that_know_a_tensor_by_two_sizes_are_refused():
    last = BOXES[-1]._replace(size=(1, 3, 2, 6))
    with pytest.raises(ConfigurationError, match="w: the ranks describe it with sizes"):
        distinct_boxes([*BOXES[:-1], last])
