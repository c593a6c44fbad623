# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A dry run predicts the peak that a count of every tensor finds in the run itself."""

import shutil

import pytest

from tests.support.counted_peak import counted_peaks, predicted_peaks
from tests.support.dry_models import CASES
from tests.support.world import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler"
    ),
]

_WITHIN = 0.05


def test_the_predicted_peak_is_within_5_percent_of_the_counted_one_for_every_kind_of_model():
    assert len(CASES) >= 12
    predicted = predicted_peaks([(case.flags, case.ranks) for case in CASES])
    wrong = []
    for ranks in sorted({case.ranks for case in CASES}):
        chosen = [index for index, case in enumerate(CASES) if case.ranks == ranks]
        counted = on_ranks(counted_peaks, ranks, [CASES[i].flags for i in chosen], timeout_s=900)
        for position, index in enumerate(chosen):
            stages = predicted[index]
            per_stage = ranks // len(stages)
            for number, stage in enumerate(stages):
                of_ranks = [counted[number * per_stage + i][position] for i in range(per_stage)]
                start, total = (max(peak[i] for peak in of_ranks) for i in (0, 1))
                error = stage.total / total - 1
                line = (
                    f"{CASES[index].name}, stage {number}: predicted {stage.total / 2**20:.2f} "
                    f"MiB, counted {total / 2**20:.2f} ({error:+.1%}); start "
                    f"{stage.start / 2**20:.2f}, counted {start / 2**20:.2f}"
                )
                print(line)
                # A start may take less: a model in construction shares memory with the rings.
                if abs(error) > _WITHIN or start > (1 + _WITHIN) * stage.start:
                    wrong.append(line)
    assert not wrong, "\n".join(wrong)
