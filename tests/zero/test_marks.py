# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Which elements of a unit's parameters count as changed."""

import pytest
import torch

from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.engine.zero import marks as marks_module
from megatron_asynchzp.engine.zero.marks import Marks, unpacked

CPU = torch.device("cpu")


@pytest.mark.parametrize("piece", [8, 24, 1 << 22])
def test_the_pieces_in_which_values_are_compared_change_nothing(monkeypatch, piece: int):
    monkeypatch.setattr(marks_module, "_PIECE_NUMEL", piece)
    numel = 64
    place = torch.zeros(numel, dtype=torch.bfloat16)
    marks = Marks(numel, CPU, is_trained=True, writes_are_casts=True)
    marks.set("one")
    values = torch.zeros(numel)
    expected = torch.zeros(numel, dtype=torch.bool)
    for index in (0, 7, 8, 31, 63):
        values[index] = 1.0 + index
        expected[index] = True
        marks.write(values, place)
        assert torch.equal(place, values.to(torch.bfloat16))
        assert torch.equal(unpacked(marks.bits["one"], Range(0, numel), (numel,)), expected)


def test_a_mark_that_is_set_again_forgets_that_all_was_rewritten():
    marks = Marks(16, CPU, is_trained=True, writes_are_casts=True)
    marks.set("one")
    marks.note_rewritten()
    assert marks.may_have_changed("one") and not marks.bits
    marks.set("one")
    assert marks.may_have_changed("one") and not marks.rewritten
    assert not marks.bits["one"].any()


def test_what_is_not_trained_changes_only_when_it_is_rewritten():
    marks = Marks(16, CPU, is_trained=False, writes_are_casts=True)
    marks.set("one")
    assert not marks.may_have_changed("one")
    marks.note_rewritten()
    assert marks.may_have_changed("one")
    marks.set("one")
    assert not marks.may_have_changed("one")
