# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Whoever writes it, a checkpoint holds the same bits; with fewer writers it has fewer parts."""

from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_asynchzp.engine.sharding.topology import Range
from megatron_asynchzp.mcore.checkpoint import save_ranks
from megatron_asynchzp.mcore.checkpoint.save_ranks import joined_along
from scripts.testbed.megatron_flags import BF16
from tests.support.checkpoints import SAVED_AT, Job, find_differences, read_tensors
from tests.support.engine import shard_groups
from tests.support.world import on_ranks


@given(st.lists(st.integers(1, 24), min_size=1, max_size=4), st.integers(1, 500))
def test_an_axis_is_used_up_before_the_next_and_no_more_is_joined_than_needed(sizes, most):
    factors = joined_along(sizes, most)
    left = prod(sizes) // prod(factors)
    assert left <= most
    assert all(size % factor == 0 for size, factor in zip(sizes, factors, strict=True))
    touched = [place for place, factor in enumerate(factors) if factor > 1]
    for place in touched[:-1]:
        assert factors[place] == sizes[place]
    if touched:  # with a smaller divisor along the last axis there would be too many
        last = touched[-1]
        smaller = [one for one in range(1, factors[last]) if sizes[last] % one == 0]
        assert all(left * factors[last] // one > most for one in smaller)


@pytest.mark.parametrize("factors", [(2, 2), (2, 3), (3, 2, 2)])
def test_each_rank_that_joins_along_several_axes_writes_as_many_runs_as_the_others(
    monkeypatch, factors
):
    monkeypatch.setattr(save_ranks, "_exchange_pieces", lambda *_: None)
    ranks = list(product(*map(range, factors)))
    written = []
    for coordinates in ranks:
        unit: Any = SimpleNamespace(optim_range=Range(0, 3))
        runs: list[Any] = [
            save_ranks._Run(unit, f"run {n}", torch.float32, (), 3, n, ())
            for n in range(2 * len(ranks))
        ]
        for coordinate, factor in zip(coordinates, factors, strict=True):
            axis: Any = SimpleNamespace(axis=SimpleNamespace(coordinate=coordinate))
            runs = list(save_ranks._exchange(runs, axis, factor))
        assert [run.numel for run in runs] == [3 * len(ranks)] * 2
        written += [run.name for run in runs]
    assert len(set(written)) == len(written) == 2 * len(ranks)


def index_of(folder: Path):
    return dist_cp.FileSystemReader(folder / f"iter_{SAVED_AT:07d}").read_metadata()


def num_parts(folder: Path) -> int:
    entries = index_of(folder).state_dict_metadata.items()
    return sum(
        len(entry.chunks)
        for key, entry in entries
        if isinstance(entry, dist_cp.TensorStorageMetadata) and ".param." not in key
    )


def saved_by(job: Job, numbers: list[int], others: list[Job], folder: Path) -> dict:
    """Save with each number of writers what was saved by all, and load that into other runs."""
    source = folder / "all"
    whole = job.train_and_save(source)
    expected, found = read_tensors(source), {}
    for number in numbers:
        target = folder / str(number)
        flags = (*job.flags, "--asynchzp-save-ranks", str(number))
        Job(job.sizes, flags).load_and_save(source, target)
        here = read_tensors(target)
        differ = find_differences(expected, here) + find_differences(here, expected)
        found[number] = (differ, num_parts(target))
    resumed = job.resume(folder / str(numbers[0]))
    found["resumed"] = resumed.steps == whole.steps[SAVED_AT:] and all(
        torch.equal(*pair) for pair in zip(whole.inspected, resumed.inspected, strict=True)
    )
    for other in others:
        place = folder / f"other {others.index(other)}"
        other.load_and_save(folder / str(numbers[0]), place)
        there = read_tensors(place)
        found[f"other {others.index(other)}"] = find_differences(
            {key: value for key, value in expected.items() if key in there}, there
        )
    return found


@pytest.mark.slow
def test_runs_joined_along_two_axes_have_the_same_bits_and_load_into_other_sizes(tmp_path):
    job, larger_shards = Job((2, 1, 4), tuple(BF16)), Job((4, 4, 4), tuple(BF16))
    for found in on_ranks(saved_by, 4, job, [1], [larger_shards], tmp_path):
        differ, parts = found[1]
        assert not differ and not found["other 0"] and found["resumed"]
        assert parts < num_parts(tmp_path / "all")


def exchanged_in_small_pieces(folder: Path) -> dict:
    save_ranks.EXCHANGE_NBYTES = 8000
    largest = []
    exchange = dist.all_to_all_single

    def counted(received, sent, *rest, **options):
        largest.append(max(received.numel(), sent.numel()))
        return exchange(received, sent, *rest, **options)

    dist.all_to_all_single = counted
    try:
        found = saved_by(Job((2, 1, 2)), [1, 2], [], folder)
    finally:
        dist.all_to_all_single = exchange
    # The longest item of 1-D parts is one element of 4 bytes on 2 ranks: pieces are never smaller.
    return {**found, "largest": max(largest)}


def test_what_one_exchange_brings_is_bounded(tmp_path):
    """Fast, whoever writes it, the same bits in fewer parts."""
    for found in on_ranks(exchanged_in_small_pieces, 2, tmp_path):
        assert 4000 < found["largest"] <= 8000
        (differ, num_few), (differ_too, num_more) = found[1], found[2]
        assert not differ and not differ_too and num_few < num_more and found["resumed"]


def plan_once(folder: Path) -> dict:
    """Save, go on and save, with a structure that stays; how often rank 0 planned in each run."""
    counts = []
    create = MCoreSavePlanner.create_global_plan

    def counted(self, plans):
        counts[-1] += 1
        return create(self, plans)

    MCoreSavePlanner.create_global_plan = counted
    job = Job((2, 1, 2), (*BF16, "--ckpt-assume-constant-structure"))
    try:
        counts.append(0)
        job.train_and_save(folder / "first")
        counts.append(0)
        job.load_and_save(folder / "first", folder / "second")
    finally:
        MCoreSavePlanner.create_global_plan = create
    first, second = (read_tensors(folder / name) for name in ("first", "second"))
    return {"counts": counts, "differ": find_differences(first, second)}


def test_the_first_save_after_a_resume_uses_the_plan_of_the_run_before(tmp_path):
    first, *others = on_ranks(plan_once, 2, tmp_path)
    assert first["counts"][0] >= 1 and first["counts"][1] == 0
    assert not any(found["differ"] for found in (first, *others))


class OnHost(torch.Tensor):
    """A tensor that is not where collectives are: `to` copies it there."""

    def to(self, *_: object) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def spread_rank_numbers() -> list[list[float]]:
    """What this rank holds in the end of a state on the device, and of one on the host, each of
    which holds the number of the rank at first."""
    own = torch.full((3,), float(dist.get_rank()))
    states = [own.clone(), own.clone().as_subclass(OnHost)]
    unit = SimpleNamespace(device=torch.device("cpu"), groups=shard_groups((1, 1, 2)))
    save_ranks.broadcast_to_replicas(unit, states)  # pyright: ignore[reportArgumentType]
    return [state.tolist() for state in states]


def test_replicas_get_the_states_of_the_first_on_the_device_and_on_the_host():
    for rank, found in enumerate(on_ranks(spread_rank_numbers, 4)):
        assert found == [[rank % 2] * 3] * 2


def reads_of(folder: Path) -> int:
    """Loads with two copies of the optimizer states: how many parts this rank read."""
    job = Job((1, 1, 1), tuple(BF16))
    whole = job.train_and_save(folder)
    counted, read = [], FileSystemReader.read_data

    def count(self, plan, planner):
        counted.append(sum(item.type.name == "TENSOR" for item in plan.items))
        return read(self, plan, planner)

    FileSystemReader.read_data = count
    try:
        resumed = job.resume(folder)
    finally:
        FileSystemReader.read_data = read
    assert resumed.steps == whole.steps[SAVED_AT:]
    assert all(torch.equal(*pair) for pair in zip(whole.inspected, resumed.inspected, strict=True))
    return sum(counted)


def test_the_first_of_several_copies_reads_for_all(tmp_path):
    first, second = on_ranks(reads_of, 2, tmp_path)
    assert first and not second, (first, second)
