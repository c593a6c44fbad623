# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron on a mesh whose long axis is cut: the numbers of the uncut one, and its checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.sharding import topology
from scripts.testbed.differences import worst_difference
from tests.support.checkpoints import SAVED_AT, Job, find_differences, read_tensors
from tests.support.world import on_ranks


@contextmanager
def axes_of_two() -> Iterator[list[int]]:
    """Within, axes of more than two ranks are long; how many axes the meshes had that were made."""
    found, longest, create = [], topology.LONGEST_AXIS, ShardGroups.create

    def noting(mesh, *args, **options):
        found.append(len(mesh.axes))
        return create(mesh, *args, **options)

    topology.LONGEST_AXIS, ShardGroups.create = 2, noting
    try:
        yield found
    finally:
        topology.LONGEST_AXIS, ShardGroups.create = longest, create


def cut_beside_uncut(size: int, sizes: list[tuple], writers: list[int], folder: Path) -> dict:
    """Largest differences of losses and gradient norms, of runs and of runs that go on with the
    other's checkpoint; and tensors that a checkpoint has in other bits after it was loaded by the
    other mesh and saved by so many ranks."""
    found = {}
    for number, job in enumerate(map(Job, sizes)):
        uncut_dir, cut_dir = folder / f"uncut{number}", folder / f"cut{number}"
        uncut = job.train_and_save(uncut_dir)
        from_uncut = job.resume(uncut_dir)
        with axes_of_two() as num_axes:
            trained, resumed = job.train_and_save(cut_dir), job.resume(uncut_dir)
        assert set(num_axes) == {size.bit_length() - 1}
        runs = [(trained, uncut), (resumed, from_uncut), (job.resume(cut_dir), from_uncut)]
        for name, (run, other) in zip(("trained", "from uncut", "from cut"), runs, strict=True):
            found[name, number] = max(
                worst_difference(run.losses, other.losses),
                worst_difference(run.grad_norms, other.grad_norms),
            )
        assert len(from_uncut.steps) == len(uncut.steps) - SAVED_AT
        for writer in writers:
            flags = ("--asynchzp-save-ranks", str(writer))
            there, back = folder / f"there{number} {writer}", folder / f"back{number} {writer}"
            with axes_of_two():
                Job(job.sizes, flags).load_and_save(uncut_dir, there)
            Job(job.sizes, flags).load_and_save(there, back)
            expected = read_tensors(uncut_dir)
            for tensors in map(read_tensors, (there, back)):
                found["bits", number, writer] = find_differences(
                    expected, tensors
                ) + find_differences(tensors, expected)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "sizes", "writers"),
    [(4, [(4, 4, 4), (1, 1, 4)], [1, 4]), (8, [(8, 8, 8)], [1, 2, 4, 8])],
)
def test_an_axis_cut_in_two_and_in_three_has_the_losses_and_the_checkpoints_of_the_uncut_one(
    size, sizes, writers, tmp_path
):
    for found in on_ranks(cut_beside_uncut, size, size, sizes, writers, tmp_path):
        for name, result in found.items():
            assert (not result) if name[0] == "bits" else result <= 1e-6, (name, result)
