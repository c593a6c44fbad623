# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The launcher of ranks: a world that does not meet is started again, a function is not; a failure
has a reason; and no rank outlives its run.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import tests.mutants.run  # noqa: F401  (starts processes of the same server)
from scripts.testbed.profile import NetworkProfile
from scripts.testbed.ranks import (
    Cluster,
    RankFailure,
    RankPlace,
    join_gloo,
    run_ranks,
    start_process,
)


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

    def __call__(self, place: RankPlace) -> tuple:
        first = join_gloo(place)
        if _count(self.folder, "join") <= self.num_failures and place.rank == 1:
            raise RuntimeError("Connection closed by peer")
        return first


def _world(folder: Path, num_failures: int) -> list:
    return run_ranks(_counted, 3, folder, join=_BreaksAtFirst(folder, num_failures))


def _imported() -> set[str]:
    return {"megatron.training", "scripts.testbed.frozen"} & sys.modules.keys()


def test_ranks_find_megatron_imported_and_its_objects_frozen_whatever_other_tests_were_collected():
    assert len(run_ranks(_imported, 1)[0]) == 2


def test_a_world_that_does_not_meet_is_started_again_and_fn_is_called_once(tmp_path):
    assert _world(tmp_path, 2) == [(1, 3)] * 3
    assert (tmp_path / "join 1").read_text() == "xxx"


def test_a_world_that_never_meets_is_reported_and_fn_is_called_nowhere(tmp_path):
    with pytest.raises(RankFailure, match="ended because another rank had failed") as failure:
        _world(tmp_path, 3)
    assert failure.value.reason == "RuntimeError: Connection closed by peer"
    assert not list(tmp_path.glob("fn*"))


def _fail_on_one(folder: Path) -> None:
    _count(folder, "fn")
    if dist.get_rank() == 1:
        raise ValueError("a fault of one rank")
    dist.barrier()


def test_a_failure_of_fn_is_reported_and_not_repeated(tmp_path):
    with pytest.raises(RankFailure, match="ValueError: a fault of one rank") as failure:
        run_ranks(_fail_on_one, 2, tmp_path)
    assert "not finished after" not in str(failure.value)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["x", "x"]


def _ends_late(network, folder: str, *failing: int) -> None:
    Path(folder, str(os.getpid())).touch()
    if dist.get_rank() in failing:
        raise ValueError("a fault of one rank")
    time.sleep(60)


@pytest.mark.parametrize(
    "failing, limit_s, output",
    [([1], 60.0, "a fault of one rank"), ([], 4.0, "not finished after 4 s")],
)
def test_a_failure_is_reported_and_no_rank_runs_afterwards(failing, limit_s, output, tmp_path):
    begin_s = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        Cluster(2, 1, NetworkProfile()).run(_ends_late, str(tmp_path), *failing, timeout_s=limit_s)
    assert output in failure.value.reason and time.monotonic() - begin_s < 30
    files = list(tmp_path.iterdir())
    assert len(files) == 2 and not any(Path("/proc", file.name).exists() for file in files)


def _place_of(network) -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), network.profile.ranks_per_node


def test_ranks_are_joined_or_alone():
    cluster = Cluster(2, 2, NetworkProfile())
    assert cluster.run(_place_of, timeout_s=60) == [(rank, 4, 2) for rank in range(4)]
    assert cluster.run(_place_of, timeout_s=60, is_joined=False) == [(0, 1, 2)] * 4


class _LateResult:
    """Takes a while to be sent, and says whether the process `peer` was still there afterwards."""

    def __init__(self, peer: int):
        self.peer = peer

    def __reduce__(self) -> tuple:
        time.sleep(1)
        return bool, (os.path.exists(f"/proc/{self.peer}"),)


def _return_late_on_one() -> _LateResult | None:
    processes: list = [None, None]
    dist.all_gather_object(processes, os.getpid())
    return _LateResult(processes[0]) if dist.get_rank() == 1 else None


def test_a_rank_that_has_returned_stays_until_all_have():
    assert run_ranks(_return_late_on_one, 2) == [None, True]


def _run_on_two(folder: str) -> None:
    Cluster(2, 1, NetworkProfile()).run(_ends_late, folder, timeout_s=60)


def test_no_rank_outlives_a_killed_starter(tmp_path):
    starter = start_process(_run_on_two, str(tmp_path))
    try:
        _await(lambda: len(list(tmp_path.iterdir())) == 2)
    finally:
        starter.kill()
        starter.join()
    _await(lambda: not any(Path("/proc", file.name).exists() for file in tmp_path.iterdir()))


def _await(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
