# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mistakes that users make, each of which ends in one line and a status that is not 0, before
anything is trained."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from megatron_asynchzp import command, launch
from megatron_asynchzp.commands import meeting
from megatron_asynchzp.engine.failure import descriptors

SCRIPT = "train.py"


class Checked(NamedTuple):
    """How Megatron's check of a command line ended."""

    returncode: int = 0
    stderr: str = ""


def let_megatron_say(monkeypatch: pytest.MonkeyPatch, checked: Checked) -> None:
    fake = SimpleNamespace(run=lambda *_, **__: checked, PIPE=subprocess.PIPE)
    monkeypatch.setattr(launch, "subprocess", fake)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: with a script, a file, an empty folder and a model."""
    monkeypatch.chdir(tmp_path)
    # Megatron's own check takes seconds; tests/commands/test_validation.py has it.
    let_megatron_say(monkeypatch, Checked())
    # Names and ports are this machine's; tests/commands/test_meeting.py has them.
    monkeypatch.setattr(launch, "check_meeting", lambda _: None)
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / SCRIPT).write_text("raise SystemExit('the script was started')\n")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "void").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "llama").mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / "llama" / name).write_text("{}")
    return tmp_path


def trains(flags: str, ranks: int = 4) -> str:
    return f"launch --nproc-per-node {ranks} {SCRIPT} {flags}"


def uses(flags: str, ranks: int = 4) -> str:
    return trains(f"--use-asynchzp {flags}", ranks)


# fmt: off
MISTAKES = {
    "a command that is not there": ("lunch train.py", "no such command; the nearest is launch"),
    "a script that is not there": ("launch absent.py", "absent.py: no such script"),
    "no script": ("launch", "no training script is given; name one that ends in .py"),
    "ranks and no script": ("launch --nproc-per-node 4", "no training script is given; name"),
    "a script by the tutorial's word": (
        "launch --nproc-per-node 4 PRETRAIN --bf16", "PRETRAIN stands for the path of a training"),
    "a folder for a script": ("dry-run runs --bf16", "runs is no Python script; name one"),
    "Muon without its arithmetic": (uses("--optimizer muon"), "megatron_asynchzp[muon]"),
    "our main flag mistyped": (trains("--use-asynchpz"), "the nearest is --use-asynchzp"),
    "a flag of ours mistyped": (
        uses("--asynchzp-param-shard-sz 2"), "the nearest is --asynchzp-param-shard-size"),
    "a flag of PASA mistyped": (
        trains("--use-pasa-atention"), "the nearest is --use-pasa-attention"),
    "sizes without the main flag": (
        trains("--asynchzp-grad-shard-size 2"), "no effect without --use-asynchzp"),
    "a mode without PASA": (
        trains("--pasa-mode block"), "no effect without --use-pasa-attention"),
    "a size that is no number": (
        uses("--asynchzp-param-shard-size two"), "nor auto, node or world"),
    "a size to choose for no cluster": (
        uses("--asynchzp-grad-shard-size auto"),
        "--asynchzp-grad-shard-size auto: give --asynchzp-cluster"),
    "a cluster that nothing is chosen for": (
        uses("--asynchzp-cluster h100"), "--asynchzp-cluster h100 has no effect"),
    "a budget that is no number": (
        uses("--asynchzp-keep-params-gb some"), "some is neither a number of GiB nor auto"),
    "a budget below 0": (
        uses("--asynchzp-keep-params-gb -1"), "--asynchzp-keep-params-gb -1: give the GiB"),
    "no ranks": (trains("--use-asynchzp", 0), "--nproc-per-node 0: give a number of ranks"),
    "ranks in words": (f"launch --nproc_per_node=four {SCRIPT}", "--nproc-per-node four: give"),
    "ranks in words for a dry run": (
        f"dry-run --nproc-per-node four {SCRIPT}", "--nproc-per-node four: give"),
    "nodes in words": (f"launch --nnodes two {SCRIPT}", "--nnodes two: give a number of nodes"),
    "a cluster that is not known": (
        uses("--asynchzp-param-shard-size auto --asynchzp-cluster h1000"),
        "h1000: no cluster of that name; the nearest is h100"),
    "FP4 by quantisers of one's own": (
        uses("--fp4-format e2m1 --fp4-recipe custom --fp4-quantizer-factory a.b"),
        "--fp4-recipe custom is not supported"),
    "a flag without its value": (
        uses("--asynchzp-param-shard-size"), "--asynchzp-param-shard-size: expected one"),
    "a size that does not divide": (
        uses("--asynchzp-param-shard-size 3"), "valid values: 1, 2, 4"),
    "a size that does not divide the ranks of a dry run": (
        f"dry-run --nproc-per-node 4 {SCRIPT} --use-asynchzp --asynchzp-param-shard-size 3",
        "valid values: 1, 2, 4"),
    "a size of nothing": (uses("--asynchzp-optim-shard-size 0"), "valid values: 1, 2, 4"),
    "a schedule that is none": (uses("--asynchzp-schedule fast"), "invalid choice: 'fast'"),
    "a negative depth": (uses("--asynchzp-prefetch-depth -1"), "-1 is not a whole number"),
    "a trace into no folder": (uses("--asynchzp-trace no/trace.json"), "no such folder"),
    "a trace into a folder": (
        uses("--asynchzp-trace runs"), "--asynchzp-trace runs: that is a folder; name a file in"),
    "a trace below a file": (
        uses("--asynchzp-trace file/trace.json"), "file is a file, not a folder; name a file in a"),
    "a capture into a folder": (
        uses("--asynchzp-capture-attention 1:runs"), "runs: that is a folder; name a file in it"),
    "figures of a capture into a folder": (
        "inspect file --json runs", "runs: that is a folder; name a file in it"),
    "a picture of a plan in no folder": (
        "plan --cluster h100 --picture no/plan.png -- x.py", "no/plan.png: no such folder; name"),
    "a flag that is not supported": (uses("--skip-train"), "--skip-train is not supported"),
    "a value that is not supported": (
        uses("--fp8-recipe custom"), "--fp8-recipe custom is not supported"),
    "settings in a file that drops flags": (
        uses("--yaml-cfg a.yaml"), "--yaml-cfg a.yaml is not supported with --use-asynchzp"),
    "settings in a file that drops PASA": (
        trains("--use-pasa-attention --yaml-cfg=run.yaml"),
        "--yaml-cfg run.yaml is not supported with --use-pasa-attention"),
    "checkpoints in memory": (
        uses("--non-persistent-ckpt-type in_memory"), "use --non-persistent-ckpt-type local or"),
    "restarts that only one node would make": (
        f"launch --nnodes 2 --nproc-per-node 4 --max-restarts 3 --master-addr host0 {SCRIPT}",
        "--max-restarts 3: with a static rendezvous"),
    "nodes that come and go without hearing of each other": (
        f"launch --nnodes 1:2 --nproc-per-node 4 --master-addr host0 {SCRIPT}",
        "--nnodes 1:2: with a static rendezvous"),
    "more nodes at least than at most": (f"launch --nnodes 3:2 {SCRIPT}", "--nnodes 3:2: give a"),
    "a capture that is none": ("inspect file", "file"),
    "no capture": ("inspect absent.pt", "absent.pt: no such file (capture one with"),
    "a folder for a capture": ("inspect runs", "runs: is a folder (capture one with"),
    "a mistyped flag of inspect": ("inspect file --picure x", "--picure: no such flag; the"),
    "a mistyped flag of calibrate": ("calibrate --tflps 9", "--tflps: no such flag; the nearest"),
    "a conversion that is none": ("hf exprt", "invalid choice: 'exprt' (choose from"),
    "a mistyped flag of a conversion": (
        "hf export --laod runs --output x", "--laod: no such flag; the nearest is --load"),
    "an export of nothing": ("hf export --load absent --output x", "--load absent: no such folder"),
    "an export of a file": ("hf export --load file --output x", "--load file: is a file; name a"),
    "an export of an empty folder": (
        "hf export --load void --output x", "void: there is no checkpoint of Megatron in it"),
    "an export of Hugging Face": (
        "hf export --load llama --output x", "--load llama: is a model of Hugging Face already"),
    "an import of no model": ("hf import --load void --save x", "there is no config.json in it"),
    "an export over something": (
        "hf export --load runs --output llama", "llama exists and is not empty"),
    "a dry run on no device": (
        f"dry-run {SCRIPT} --asynchzp-device-gb -3", "--asynchzp-device-gb -3: give the GiB"),
}
# fmt: on


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_line_and_not_with_0(folder, monkeypatch, capfd, mistake):
    words, fragment = MISTAKES[mistake]
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda *_: started.append("torchrun"))
    try:
        status = command.main(words.split())
    except SystemExit as end:
        status = end.code
    lines = [line for line in capfd.readouterr().err.splitlines() if line]
    assert status == 2 and not started
    assert len(lines) == 1 and fragment in lines[0], lines


def test_ranks_that_cannot_meet_end_in_one_line_before_torchrun(folder, monkeypatch, capfd):
    monkeypatch.setattr(launch, "check_meeting", meeting.check_meeting)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("torchrun was started"))
    with pytest.raises(SystemExit) as ended:
        command.main(f"launch --nnodes 2 --master-addr no.such.invalid {SCRIPT}".split())
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("megatron_asynchzp: --master-addr no.such.invalid: no")


@pytest.mark.parametrize(
    "words, line",
    [
        (f"{SCRIPT} --use-asynchzp", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: this process"),
        (f"--nproc-per-node 4 {SCRIPT} --use-asynchzp", "RANK=0 in the environment says that this"),
    ],
)
def test_a_rank_in_the_environment_alone_is_refused_before_anything_is_imported(
    folder, monkeypatch, capfd, words, line
):
    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "run_script", lambda *_: pytest.fail("the script was started"))
    with pytest.raises(SystemExit) as ended:
        command.main(["launch", *words.split()])
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"megatron_asynchzp: {line}")


@pytest.mark.parametrize("script", ["absent.py", "runs"])
def test_a_rank_whose_script_is_not_there_ends_in_one_line(folder, monkeypatch, capfd, script):
    monkeypatch.setattr(launch, "run_script", lambda *_: pytest.fail("the script was started"))
    with pytest.raises(SystemExit) as ended:
        launch.main([script, "--use-asynchzp"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == f"megatron_asynchzp: {script}: no such script\n"


def test_scalars_without_their_writer_are_told_of_before_megatron_speaks(
    folder, monkeypatch, capfd
):
    monkeypatch.setattr(launch, "run_script", lambda *_: print("the script runs"))
    for name, installed, rank, told in (
        ("tensorboard", None, "0", True),
        ("tensorboard", None, "1", False),
        ("tensorboard", sys, "0", False),
    ):
        monkeypatch.setitem(sys.modules, name, installed)
        monkeypatch.setenv("RANK", rank)
        launch.main([SCRIPT, "--tensorboard-dir=events"])
        *lines, last = capfd.readouterr().out.splitlines()
        assert last == "the script runs"
        assert (
            lines
            == [
                "megatron_asynchzp: --tensorboard-dir: needs the package tensorboard, which is not "
                'installed; pip install "megatron_asynchzp[quickstart]"; no scalars are written'
            ]
            * told
        )


@pytest.mark.parametrize("words", ["launch {} --use-asynchzp", "{} --use-asynchzp"])
def test_few_open_files_end_in_one_line_however_ranks_are_started(
    folder, monkeypatch, capfd, words
):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("torchrun was started"))
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (40, 40))
    start = command.main if words.startswith("launch") else launch.main
    with pytest.raises(SystemExit) as ended:
        start(words.format(SCRIPT).split())
    assert ended.value.code == 2
    assert "ulimit -n is 40 on this host, but a rank takes 256" in capfd.readouterr().err


@pytest.mark.parametrize(("rank", "is_refused"), [("0", True), ("1", False)])
def test_a_first_rank_needs_two_files_for_each_of_the_others(
    folder, monkeypatch, capfd, rank, is_refused
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "50")
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (300, 300))
    monkeypatch.setattr(launch, "run_script", lambda *_: print("the script runs"))
    if not is_refused:
        launch.main([SCRIPT])
        return
    with pytest.raises(SystemExit):
        launch.main([SCRIPT])
    line = "the store at which 50 ranks meet takes 356 files"  # 256 and 2 for each
    assert line in capfd.readouterr().err


def test_what_megatron_refuses_is_one_line_before_torchrun(folder, monkeypatch, capfd):
    refused = Checked(2, "a warning\nmegatron_asynchzp: unrecognized arguments: --num-layrs\n")
    let_megatron_say(monkeypatch, refused)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("torchrun was started"))
    with pytest.raises(SystemExit) as ended:
        command.main(uses("--num-layrs 2").split())
    assert ended.value.code == 2
    assert capfd.readouterr().err == "megatron_asynchzp: unrecognized arguments: --num-layrs\n"


def test_a_command_line_without_a_mistake_becomes_torchrun(folder, monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    command.main(uses("--asynchzp-param-shard-size 2").split())
    (words,) = started
    assert words[1:5] == ["-m", "megatron_asynchzp.commands.torchrun", "--nproc-per-node", "4"]
    assert words[5:8] == ["-m", "megatron_asynchzp.launch", SCRIPT]


@pytest.mark.parametrize(
    "options, shares_no_store",
    [
        ("--nnodes 2 --master-addr host0", False),
        ("--nnodes 1 --master-port 2000 --max-restarts 3", True),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:2000 --max-restarts 3", True),
        ("--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint host0:2000", True),
        ("--standalone --max_restarts=3", True),
    ],
)
def test_torchrun_gets_the_restarts_that_can_meet_again(
    folder, monkeypatch, options, shares_no_store
):
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.extend(words))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    command.main(f"launch {options} {SCRIPT}".split())
    assert started[3 : 3 + len(options.split())] == options.split()
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in os.environ) == shares_no_store


@pytest.mark.parametrize("words", [uses("--asynchzp-param-shard-size 3")])
def test_a_refusal_takes_less_than_5_seconds_from_the_shell_on(folder, words):
    start_s = time.monotonic()
    line = [sys.executable, "-m", "megatron_asynchzp", *words.split()]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert time.monotonic() - start_s < 5


def test_torchrun_gets_the_line_for_the_table_that_it_ends_with(folder, monkeypatch, capfd):
    """Read back by torch's own class for the error of a rank."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        launch.main([SCRIPT, "--use-asynchzp", "--asynchzp-param-shard-size", "3"])
    failure = ProcessFailure(0, os.getpid(), 2, str(folder / "error.json"))
    line = capfd.readouterr().err.strip()
    assert line == f"megatron_asynchzp: {failure.message['message']}"
