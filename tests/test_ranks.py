# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The ranks that the tests run on: a world that does not meet is started again, a test is not."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import RankFailure, run_ranks


def _count(folder: Path, name: str) -> int:
    """Note a call of this rank in `folder`; how many it has made."""
    with open(folder / f"{name} {dist.get_rank()}", "a") as file:
        file.write("x")
    return len((folder / f"{name} {dist.get_rank()}").read_text())


def _counted(folder: Path) -> tuple[int, int]:
    return _count(folder, "fn"), dist.get_world_size()


class _BreaksAtFirst:
    """Rank 1 does not join the first `num_failures` worlds."""

    def __init__(self, folder: Path, num_failures: int):
        self.folder, self.num_failures = folder, num_failures

    def __call__(self, rank: int, world_size: int, port: int):
        store = ranks._join(rank, world_size, port)
        if _count(self.folder, "join") <= self.num_failures and rank == 1:
            raise RuntimeError("Connection closed by peer")
        return store


def _world(folder: Path, num_failures: int) -> tuple[dict, dict]:
    join = _BreaksAtFirst(folder, num_failures)
    return ranks._collect(_counted, 3, (folder,), 60.0, {}, join=join)


def test_a_world_that_does_not_meet_is_started_again_and_fn_is_called_once(tmp_path):
    results, errors = _world(tmp_path, 2)
    assert results == dict.fromkeys(range(3), (1, 3)) and not errors
    assert (tmp_path / "join 1").read_text() == "xxx"


def test_a_world_that_never_meets_is_told_and_fn_is_called_nowhere(tmp_path):
    results, errors = _world(tmp_path, 3)
    assert not results and "Connection closed by peer" in errors.pop(1)
    assert set(errors.values()) == {"ended because another rank had failed"}
    assert not list(tmp_path.glob("fn*"))


def _fail_on_one(folder: Path) -> None:
    _count(folder, "fn")
    if dist.get_rank() == 1:
        raise ValueError("a fault of one rank")
    dist.barrier()


def test_a_failure_of_fn_is_told_and_not_repeated(tmp_path):
    with pytest.raises(RankFailure, match="ValueError: a fault of one rank") as failure:
        run_ranks(_fail_on_one, 2, tmp_path)
    assert "not finished after" not in str(failure.value)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["x", "x"]


def _wait_for_ever() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_a_rank_that_does_not_end_is_told_with_the_time_that_it_had():
    with pytest.raises(RankFailure, match="not finished after 2 s"):
        run_ranks(_wait_for_ever, 2, timeout_s=2.0)
