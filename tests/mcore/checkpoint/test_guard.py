# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The guard around Megatron's saving and loading, in Megatron's own pretrain() on two ranks."""

import contextlib
import logging
import os
import resource
import shutil
import signal
from argparse import Namespace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_asynchzp.checkpoint_files.choice import TRACKER, Choice, choose_checkpoint
from megatron_asynchzp.checkpoint_files.errors import SaveError
from megatron_asynchzp.checkpoint_files.manifest import MANIFEST
from megatron_asynchzp.checkpoint_files.saving import SaveLock, complete_directory
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.torch_dist import write_checkpoint
from megatron_asynchzp.mcore.checkpoint import load_guard, save_guard
from megatron_asynchzp.mcore.checkpoint.load_guard import chosen_metadata
from megatron_asynchzp.mcore.checkpoint.operation import Load
from scripts.testbed.megatron_runs import RunRecord, gpt_args, run_pretrain
from tests.support.checkpoint_damage import DATA, HARMFUL, NEWER, OLDER
from tests.support.saved_state import read_state
from tests.support.world import on_ranks


def _run(*flags: str) -> RunRecord:
    try:
        few = ("--train-iters", "4", "--global-batch-size", "2")
        argv = gpt_args(*few, "--use-asynchzp", *flags)
        return run_pretrain(argv, inspect=lambda chunks, _: chunks[0].runtime.step)
    finally:
        while SaveLock._held:  # the next run in these processes is another one
            os.close(SaveLock._held.popitem()[1])


def _refusal(*flags: str) -> str:
    """What the run is refused with, and that it is one line."""
    try:
        _run(*flags)
    except (ConfigurationError, SaveError) as error:
        assert "\n" not in str(error)
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


def _on_rank_0(act) -> None:
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def _copy(folder: str, origin: str) -> None:
    """Two checkpoints that an uninterrupted run has saved."""
    _on_rank_0(lambda: shutil.copytree(origin, folder))


def _train_damage_and_resume(folder: str, origin: str) -> dict:
    place, saving = Path(folder), ("--save", folder, "--save-interval", "2")
    whole = _run("--save", origin, "--save-interval", "2")
    _copy(folder, origin)
    output = {"whole": whole.losses}
    output["manifests"] = [(place / name / MANIFEST).exists() for name in (OLDER, NEWER)]
    output["saved"] = read_state(place / NEWER)
    dist.barrier()
    _on_rank_0(lambda: HARMFUL["data files exchanged"](place))
    _on_rank_0(lambda: (place / TRACKER).write_text("what?"))
    again = _run("--load", folder, *saving)
    output |= {"resumed": again.losses, "log": again.log, "last step": again.inspected}
    output["tracker"] = (place / TRACKER).read_text()
    output["chosen"] = choose_checkpoint(place).iteration
    output["saved again"] = read_state(place / NEWER)
    dist.barrier()
    _on_rank_0(lambda: (place / TRACKER).write_text("-7"))
    step = _run("--load", folder, "--ckpt-step", "2")
    output["from step 2"] = step.losses
    output["tracker after it"] = (place / TRACKER).read_text()
    return output


REFUSED: list[tuple[list[str], str]] = [
    (
        ["--hidden-size", "32"],
        "is of another model: --hidden-size is 64 in the checkpoint and 32 in this run",
    ),
    (["--no-save-optim"], "reads no optimizer from --load either; leave it out, or add --no-load"),
    (["--ckpt-step", "3"], "no such directory; the newest intact one is --ckpt-step 4"),
    (["--load", "nowhere", "--exit-on-missing-checkpoint"], "no checkpoint in nowhere"),
    (
        ["--lr-decay-iters", "200"],
        "has another learning-rate schedule: total number of iterations is 200 there and 400 in "
        "this run; add --override-opt-param-scheduler",
    ),
]


def _refused_loads(folder: str, origin: str) -> list[str]:
    _copy(folder, origin)
    _on_rank_0(lambda: shutil.rmtree(Path(folder) / OLDER))
    output = [_refusal("--load", folder, *flags) for flags, _ in REFUSED]
    without = f"{folder} without optimizer"
    _run("--save", without, "--save-interval", "1", "--no-save-optim", "--train-iters", "1")
    output.append(_refusal("--load", without))
    dist.barrier()
    _on_rank_0(lambda: HARMFUL[f"{DATA[1]} cut to 0.500"](Path(folder)))
    return [*output, _refusal("--load", folder)]


def _full_disk(folder: str, origin: str) -> tuple[list[str], int, str]:
    """The last save exceeds what rank 1 may write to one file."""
    _copy(folder, origin)
    _on_rank_0(lambda: HARMFUL["the directory removed"](Path(folder)))
    _on_rank_0(lambda: (Path(folder) / TRACKER).write_text("2"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        output = _refusal("--load", folder, "--save", folder, "--save-interval", "2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    all_output = [None, None]
    dist.all_gather_object(all_output, output)
    return all_output, choose_checkpoint(folder).iteration, (Path(folder) / TRACKER).read_text()


def _structure(folder: str, origin: str) -> tuple[str, str]:
    """A flipped bit in a tensor, before the same run with and without reading the data."""
    _copy(folder, origin)
    _on_rank_0(lambda: shutil.rmtree(Path(folder) / OLDER))
    _on_rank_0(lambda: HARMFUL[f"{DATA[0]} bit in record data/0"](Path(folder)))
    refused = _refusal("--load", folder)
    return refused, _refusal("--load", folder, "--asynchzp-verify", "structure")


def _async_save(folder: str) -> tuple[list[bool], str]:
    beside = ("--async-save", "--async-strategy", "mcore")
    _run("--save", folder, "--save-interval", "2", *beside)
    manifests = [(Path(folder) / name / MANIFEST).exists() for name in (OLDER, NEWER)]
    return manifests, (Path(folder) / TRACKER).read_text()


def _all_bodies(folder: str) -> dict:
    """Starting Megatron costs more than these runs: one set of ranks for all of them."""
    output = {}
    for body in (_train_damage_and_resume, _refused_loads, _structure, _full_disk):
        place = Path(folder, body.__name__)
        output[body.__name__] = str(place), body(str(place), f"{folder}/whole")
        dist.barrier()
    return output


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> list[dict]:
    """What each body found, in which folder, by rank."""
    return on_ranks(_all_bodies, 2, str(tmp_path_factory.mktemp("runs")), timeout_s=600.0)


def test_a_run_goes_on_from_the_newest_intact_checkpoint_as_if_it_had_not_stopped(output):
    place, found = output[0]["_train_damage_and_resume"]
    assert found["manifests"] == [True, True]
    assert found["resumed"] == found["whole"][2:] == found["from step 2"]
    assert f"{place}: {NEWER} is skipped: " in found["log"]
    assert f"{TRACKER} now names {OLDER}" in found["log"]
    assert found["last step"] == 4  # as Megatron counts, and not the second of this process
    assert found["tracker"] == "4" and found["chosen"] == 4
    assert found["tracker after it"] == "-7"  # a step that is asked for is not the newest
    states = [name for name in found["saved"] if "rng" not in name and "common" not in name]
    assert len(states) > 30
    assert [name for name in states if found["saved"][name] != found["saved again"][name]] == []


def test_what_cannot_be_loaded_is_one_line_on_every_rank(output):
    (_, (*lines, without, damaged)), (_, others) = (one["_refused_loads"] for one in output)
    assert [*lines, without, damaged] == others
    for line, (flags, expected) in zip(lines, REFUSED, strict=True):
        assert expected in line, flags
    assert "holds no state of an optimizer (--no-save-optim); add --no-load-optim" in without
    assert "has no intact checkpoint" in damaged and DATA[1] in damaged


def test_the_flag_sets_what_loading_reads(output):
    for full, structure in (one["_structure"][1] for one in output):
        assert "has no intact checkpoint" in full and "the checksum of record" in full
        assert structure == "it was not refused"


def test_a_full_disk_ends_the_run_in_one_line_and_leaves_the_older_checkpoint(output):
    place, (lines, iteration, tracker) = output[0]["_full_disk"]
    for line in lines:
        assert line.startswith(f"SaveError: {place}/{NEWER} could not be saved: "), line
    assert "File too large" in lines[1] and "rank 1 could not write" in lines[0]
    assert iteration == 2 and tracker == "2"


def test_an_asynchronous_save_is_complete_before_the_tracker_names_it(tmp_path):
    assert on_ranks(_async_save, 2, str(tmp_path / "run"))[0] == ([True, True], "4")


# --- how a load ends ---------------------------------------------------------------------------


def _two_empty(folder: Path, tracker: str) -> tuple[Namespace, Choice]:
    (folder / TRACKER).write_text(tracker)
    args = Namespace(ckpt_step=None, exit_on_missing_checkpoint=False)
    return args, Choice(folder / NEWER)


def test_a_load_folder_without_a_checkpoint_is_one_line_after_loading(tmp_path, capsys):
    args = Namespace(
        save=None,
        load=str(tmp_path),
        ckpt_step=None,
        pretrained_checkpoint=None,
        asynchzp_verify="full",
    )
    assert load_guard.guard_load_checkpoint(lambda: (0, 0), args, "load") == (0, 0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"megatron_asynchzp: --load {tmp_path}: there is no checkpoint, ")


@pytest.mark.parametrize("is_of_checkpoint", [False, True])
def test_a_schedule_of_the_checkpoint_is_applied_once_more_when_all_of_it_is_read(
    tmp_path, is_of_checkpoint
):
    """Megatron's own applies it before it has read the weight decay."""
    args = Namespace(
        save=None, load=str(tmp_path), ckpt_step=None, pretrained_checkpoint=None,
        asynchzp_verify="full", use_checkpoint_opt_param_scheduler=is_of_checkpoint,
    )  # fmt: skip
    calls: list[object] = []
    scheduler = Namespace(step=lambda increment: calls.append(increment))
    load_guard.guard_load_checkpoint(lambda: calls.append("read"), args, "load", scheduler)
    assert calls == ["read", 0][: 1 + is_of_checkpoint]


@pytest.mark.parametrize("is_given", [True, False])
def test_arguments_are_read_from_the_checkpoint_that_is_chosen(tmp_path, is_given):
    write_checkpoint(tmp_path / "iter_0000003", [], {"args": Namespace()})
    complete_directory(tmp_path / "iter_0000003")
    (tmp_path / TRACKER).write_text("3")
    args = Namespace(ckpt_step=None, exit_on_missing_checkpoint=False)
    folder = str(tmp_path) if is_given else None
    assert load_guard.guard_load_args(lambda: args.ckpt_step, args, folder) == (
        3 if is_given else None
    )
    assert args.ckpt_step is None


def test_no_save_leaves_its_ear_at_megatrons_log(tmp_path):
    writer = logging.getLogger(save_guard._WRITER)
    before = list(writer.handlers)
    for error in (None, OSError("no space"), ValueError()):
        with contextlib.suppress(SaveError, ValueError):
            with save_guard._explaining(save_guard.SaveLog(), tmp_path):
                assert len(writer.handlers) == len(before) + 1
                if error is not None:
                    raise error
        assert writer.handlers == before


@pytest.mark.parametrize("folders", [["iter_2", "iter_4"], []])
def test_a_collective_that_fails_while_saves_in_the_background_end_names_the_oldest(
    monkeypatch, folders
):
    def fail() -> None:
        raise RuntimeError("Connection closed")

    monkeypatch.setattr(save_guard, "collective_of", lambda _: "all_gather over ranks 0 and 1")
    saves = save_guard.SaveLog()
    saves.pending += folders
    with pytest.raises(RuntimeError, match="Connection closed") as failed:
        save_guard.guard_finalizing(fail, saves)
    assert isinstance(failed.value, save_guard.CollectiveFailure) == bool(folders)
    assert ("the save of iter_2" in str(failed.value)) == bool(folders)
    assert save_guard.guard_finalizing(lambda: "ended", saves) == "ended"


def test_a_tracker_that_cannot_be_written_does_not_stop_the_load(tmp_path):
    args, choice = _two_empty(tmp_path, "garbage")
    loaded = []
    load_guard._load(
        lambda: loaded.append((args.ckpt_step, chosen_metadata(tmp_path / TRACKER))),
        args,
        str(tmp_path),
        Load(choice),
    )
    assert loaded == [(4, (4, False))]
    assert args.ckpt_step is None and chosen_metadata(tmp_path / TRACKER) is None


@pytest.mark.parametrize(
    "error",
    [SystemExit(), SystemExit(0), KeyError("optimizer"), AssertionError("a\nb"), EOFError()]
    + [RuntimeError("PytorchStreamReader failed"), CheckpointException("read", {})],
)
def test_no_way_of_giving_up_is_a_success_or_a_traceback(tmp_path, error):
    def load():
        raise error

    args, choice = _two_empty(tmp_path, "4")
    with pytest.raises(ConfigurationError) as refused:
        load_guard._load(load, args, str(tmp_path), Load(choice))
    assert "\n" not in str(refused.value) and str(choice.folder) in str(refused.value)


@pytest.mark.parametrize("error", [SystemExit(3), RuntimeError("Connection closed"), TypeError()])
def test_what_is_not_about_files_passes(tmp_path, error):
    def load():
        raise error

    args, choice = _two_empty(tmp_path, "4")
    with pytest.raises(type(error)) as passed:
        load_guard._load(load, args, str(tmp_path), Load(choice))
    assert passed.value is error
