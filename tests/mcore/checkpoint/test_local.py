# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints: a run goes on from the newest that is whole somewhere on its nodes, and from
shared storage, with a line, where none is."""

import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.checkpoint_files.local_files import NodeFolder, adopt, lacking
from megatron_asynchzp.checkpoint_files.peers import Peers
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint.local import find_local, keepers_of
from scripts.testbed.megatron_runs import RunRecord, run_pretrain
from tests.support.checkpoints import Job, state_of
from tests.support.world import on_ranks

_SHARED, _LOCAL, _STEPS = 3, 4, 6
_LINE = "megatron_asynchzp: local checkpoint of iteration 4 is "
_NO_SHARD = "not loaded: no copy of the shard of rank 2 is left"


def train(folder: Path, *more: str, sizes: tuple[int, int, int] = (2, 2, 4)) -> RunRecord:
    """The tiny GPT on two nodes of two ranks, each with a folder of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    node = folder / f"node{dist.get_rank() // 2}"
    flags = ["--load", str(folder / "runs"), "--save", str(folder / "runs"), "--replication"]
    flags += ["--save-interval", str(_SHARED), "--non-persistent-ckpt-type", "local"]
    flags += ["--non-persistent-save-interval", "2", "--non-persistent-local-ckpt-dir", str(node)]
    flags += ["--replication-jump", "2", "--override-opt_param-scheduler"]
    flags += [str(folder / word) if word == "base" else word for word in more]
    return run_pretrain(Job(sizes).argv(*flags), inspect=state_of)


def _shard(folder: Path, rank: int, owner: int) -> Path:
    return folder / f"node{rank // 2}" / str(rank) / f"iter_000000{_LOCAL}_{owner}_local.pt"


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _lose(folder: Path, node: int) -> None:
    shutil.rmtree(folder / f"node{node}")


def _replace(folder: Path) -> None:
    """Node 1 is lost, another one comes, and torchrun numbers the one that is left last."""
    _lose(folder, 1)
    (folder / "node0").rename(folder / "node1")


def _damage_one(folder: Path) -> None:
    _damage(_shard(folder, 2, 2))


def _damage_both(folder: Path) -> None:
    _damage(_shard(folder, 2, 2))
    _damage(_shard(folder, 0, 2))
    _shard(folder, 1, 1).with_name("iter_0000004_1_local.dirty.pt").write_bytes(b"half")


def _as_it_was(folder: Path) -> None:
    pass


def _before_the_first_save(folder: Path) -> None:
    """The run began from the checkpoint of another one, and has none of its own yet."""
    (folder / "runs").rename(folder / "base")


# What happens to the nodes, what the run is given, where it goes on, and what it says.
CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...], int, str]] = {
    "nothing": (_as_it_was, (), _LOCAL, "loaded"),
    "a node": (partial(_lose, node=1), (), _LOCAL, "loaded"),
    "the first node": (partial(_lose, node=0), (), _LOCAL, "loaded"),
    "a node that is replaced": (_replace, (), _LOCAL, "loaded"),
    "a shard": (_damage_one, (), _LOCAL, "loaded"),
    "a shard and its copy": (_damage_both, (), _SHARED, _NO_SHARD),
    "its place, for another size": (
        _as_it_was,
        ("--asynchzp-optim-shard-size", "2"),
        _SHARED,
        "not loaded: asynchzp_optim_shard_size is 4 there and 2 in this run",
    ),
    "its place, for an earlier step": (
        _as_it_was,
        ("--ckpt-step", "3"),
        _SHARED,
        "not loaded: this run starts from another one",
    ),
    "its first save": (
        _before_the_first_save,
        ("--pretrained-checkpoint", "base"),
        _LOCAL,
        "loaded",
    ),
}


def resume_all(folder: Path) -> dict[str, tuple]:
    def at_once(act: Callable[[], None]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            act()
        dist.barrier()

    def set_back(harm: Callable[[Path], None]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)
        harm(folder)

    kept = folder.with_name("kept")
    whole = train(folder)
    at_once(partial(shutil.rmtree, folder))
    train(folder, "--train-iters", str(_LOCAL))
    # It died before it saved at the end.
    at_once(lambda: shutil.rmtree(folder / "runs" / f"iter_000000{_LOCAL}"))
    at_once(lambda: folder.rename(kept))
    output = {}
    for name, (harm, flags, began, _) in CASES.items():
        at_once(partial(set_back, harm))
        rest = train(folder, *flags)
        is_same = len(whole.inspected) == len(rest.inspected)  # not on other sizes
        is_same = is_same and all(map(torch.equal, whole.inspected, rest.inspected))
        output[name] = (whole.steps[began:], rest.steps, is_same, rest.log)
    at_once(partial(set_back, _as_it_was))
    try:
        train(folder, "--save", str(folder / "others"))
    except ConfigurationError as error:
        output["of another run"] = ((), (), True, str(error))
    return output


@pytest.mark.slow
def test_a_run_goes_on_from_what_its_nodes_have_kept_and_else_from_shared_storage(tmp_path):
    pytest.importorskip("nvidia_resiliency_ext")
    folder = tmp_path / "run"
    for rank, output in enumerate(on_ranks(resume_all, 4, folder)):
        *_, error = output.pop("of another run")
        assert f"local checkpoints of the run with --save {folder / 'runs'}: name another" in error
        for name, (whole, rest, is_same_state, log) in output.items():
            line = CASES[name][3]
            assert rank or _LINE + line in log, (name, log)
            if name == "its place, for another size":
                losses = [step.loss for step in whole]
                assert [step.loss for step in rest] == pytest.approx(losses, rel=0, abs=1e-6)
            else:
                assert rest == whole and is_same_state, name


def resume_passing(folder: Path) -> dict[str, tuple]:
    """With non-persistent checkpoints on shared storage: what each run should do, and what it did
    from the two checkpoints that one before has left, the newer of them not persistent."""
    kept, other = folder.with_name("kept"), folder.with_name("other")
    place = Path("non_persistent", f"iter_000000{_LOCAL}")

    def run(*more: str, runs: Path = folder) -> RunRecord:
        flags = ["--load", str(runs), "--save", str(runs), "--save-interval", str(_SHARED)]
        flags += ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "2"]
        return run_pretrain(Job((2, 2, 4)).argv(*flags, "--override-opt_param-scheduler", *more))

    def harm(act: Callable[[], object]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            act()
        dist.barrier()

    def set_back(act: Callable[[], object] = lambda: None) -> None:
        def all_of_it() -> None:
            for runs in (folder, other):
                shutil.rmtree(runs, ignore_errors=True)
                shutil.copytree(kept, runs)
            act()

        harm(all_of_it)

    whole = run()
    harm(partial(shutil.rmtree, folder))
    run("--train-iters", str(_LOCAL))
    harm(lambda: shutil.rmtree(folder / f"iter_000000{_LOCAL}"))
    harm(lambda: folder.rename(kept))
    set_back(lambda: shutil.rmtree(folder / place))
    tuned = run("--finetune")
    seen = {}
    set_back()
    seen["the newest"] = whole.steps[_LOCAL:], run()
    set_back(lambda: _damage(next((folder / place).glob("__0_0.distcp"))))
    seen["a damaged one"] = whole.steps[_SHARED:], run()
    set_back()
    seen["another run's weights"] = tuned.steps, run("--finetune")
    set_back()
    at = ["--non-persistent-global-ckpt-dir", str(folder / place.parent)]
    seen["another run's steps"] = whole.steps[_SHARED:], run(*at, runs=other)
    return {name: (steps, record.steps, record.log) for name, (steps, record) in seen.items()}


@pytest.mark.slow
def test_the_newest_of_this_runs_lasting_and_passing_checkpoints_is_loaded_and_verified(tmp_path):
    for rank, output in enumerate(on_ranks(resume_passing, 4, tmp_path / "run")):
        for name, (whole, rest, log) in output.items():
            assert rest == whole, (name, log[-3000:])
        line = f"is not loaded: it is of the run with --save {tmp_path / 'run'}"
        assert rank or line in output["another run's steps"][2]


# --- one node by itself ------------------------------------------------------------------------


class State:
    """What the library writes, as far as we read it."""

    def __init__(self, **args):
        self.common_state_dict = {"args": Namespace(**args)}


class Manager:
    """The library's, which finds what it is said to find."""

    def __init__(self, folder: Path):
        self.local_ckpt_dir, self.latest_iteration = folder / "0", 7

    def find_latest(self) -> int:
        names = (path.name for path in self.local_ckpt_dir.glob("iter_*_0_local.pt"))
        return max((int(name.split("_")[1]) for name in names), default=-1)


@pytest.fixture
def args(tmp_path) -> Namespace:
    return Namespace(
        rank=0, world_size=1, save=str(tmp_path / "runs"), replication=False, num_layers=2,
        asynchzp_param_shard_size=1, non_persistent_local_ckpt_dir=str(tmp_path),
    )  # fmt: skip


def write(folder: Path, rank: int, iteration: int, owner: int, args: dict) -> Path:
    path = folder / str(rank) / f"iter_{iteration:07d}_{owner}_local.pt"
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save(State(**args), path)
    return path


def find(args: Namespace, folder: Path, shared: int = -1, is_wanted: bool = True):
    return find_local(args, Manager(folder), shared, is_wanted, Peers())


def test_the_newest_that_fits_is_found_and_the_others_are_removed(tmp_path, args):
    for iteration in (2, 4, 6):
        write(tmp_path, 0, iteration, 0, vars(args))
    write(tmp_path, 0, 8, 0, vars(args) | {"world_size": 2})
    found = find(args, tmp_path)
    assert found.iteration == 6
    assert found.lines[0].endswith("is not loaded: world_size is 2 there and 1 in this run")
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["iter_0000006_0_local.pt"]


@pytest.mark.parametrize("changed", [
    "world_size", "asynchzp_param_shard_size", "num_layers", "pipeline_model_parallel_size",
])  # fmt: skip
def test_what_shards_depend_on_has_to_be_the_same(tmp_path, args, changed):
    write(tmp_path, 0, 4, 0, vars(args) | {changed: 8})
    found = find(args, tmp_path)
    assert found.iteration == -1 and f"{changed} is 8 there and" in found.lines[0]
    assert not list((tmp_path / "0").iterdir())


def test_a_newer_shared_checkpoint_and_a_run_that_goes_back_leave_local_ones_alone(tmp_path, args):
    for shared, is_wanted in ((5, True), (-1, False)):
        write(tmp_path, 0, 4, 0, vars(args))
        assert find(args, tmp_path, shared, is_wanted).iteration == -1
    write(tmp_path, 0, 4, 0, vars(args))
    assert find(args, tmp_path, shared=4).iteration == 4


def test_the_checkpoints_of_another_run_are_refused_and_left_as_they_are(tmp_path, args):
    path = write(tmp_path, 0, 4, 0, vars(args) | {"save": "elsewhere"})
    with pytest.raises(ConfigurationError, match="of the run with --save elsewhere: name another"):
        find(args, tmp_path)
    assert path.exists()


def test_what_is_damaged_or_half_written_is_not_loaded(tmp_path, args):
    for place in range(0, 1200, 37):
        good = write(tmp_path, 0, 4, 0, vars(args))
        data = bytearray(good.read_bytes())
        data[place] ^= 16
        bad = good.with_name("iter_0000006_0_local.pt")
        bad.write_bytes(data)
        good.with_name("iter_0000006_0_local.dirty.pt").write_bytes(data[:place])
        found = find(args, tmp_path)
        if found.iteration == 6:  # some bytes of a zip archive are read by nobody
            assert vars(torch.load(bad, weights_only=False).common_state_dict["args"]) == vars(args)
        else:
            assert found.iteration == 4 and "000006" in found.lines[0] and not bad.exists()
        assert not list(good.parent.glob("*.dirty.pt"))


def test_a_shard_is_lacking_where_no_rank_that_is_asked_has_it():
    """All ways in which four ranks of two nodes may hold shards, with copies two ranks further."""
    asked = [[0, 2], [1, 3], [0, 2], [1, 3]]
    for bits in range(2**16):
        held = [[(4, o) for o in range(4) if bits >> 4 * r + o & 1] for r in range(4)]
        expected = [o for o in range(4) if not any((4, o) in held[r] for r in asked[o])]
        assert lacking(held, 4, asked) == expected


@pytest.mark.parametrize("jump, factor", [(1, 2), (2, 2), (4, 2), (2, 4), (1, 1), (3, 2)])
def test_copies_of_a_shard_are_kept_by_ranks_that_lie_a_jump_apart(jump, factor):
    """As the library deals ranks out: one to each group of a block in turn."""
    args, world_size = Namespace(replication=True, replication_jump=jump), 4 * jump * factor
    args.replication_factor = factor
    groups = [
        [block + first + jump * number for number in range(factor)]
        for block in range(0, world_size, jump * factor)
        for first in range(jump)
    ]
    assert sorted(rank for group in groups for rank in group) == list(range(world_size))
    for group in groups:
        assert all(list(keepers_of(args, rank)) == group for rank in group)
    assert list(keepers_of(Namespace(replication=False), 5)) == [5]


def test_what_a_rank_kept_elsewhere_on_its_node_is_adopted_by_the_one_in_its_place(tmp_path):
    for rank, owner in ((0, 0), (0, 2), (1, 1), (1, 3)):
        write(tmp_path, rank, 4, owner, {})
    places = [NodeFolder(tmp_path / str(rank), rank, 2, 2) for rank in (2, 3)]
    for place in places:
        adopt(place, [True, True, False, False])  # on storage that nodes share, ranks 0 and 1 do
    assert not any(place.files() for place in places)
    for place in places:
        adopt(place, [False] * 4)
    assert [[one.rank for one in place.files()] for place in places] == [[0, 2], [1, 3]]
