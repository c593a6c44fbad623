# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mistakes in Megatron's own flags: each is one line before Megatron validates its arguments."""

import os
import struct
import sys

import pytest

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags import checks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder: a dataset, broken datasets, checkpoints, models and a file."""
    monkeypatch.chdir(tmp_path)
    for name in ("nvidia_resiliency_ext", "emerging_optimizers"):
        monkeypatch.setitem(sys.modules, name, None)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 0)
    for name, idx, data in (
        ("good", index, b"tokens"),
        ("empty", b"", b"tokens"),
        ("foreign", b"PK\x03\x04 an archive", b"tokens"),
        ("hollow", index, b""),
    ):
        (tmp_path / f"{name}.idx").write_bytes(idx)
        (tmp_path / f"{name}.bin").write_bytes(data)
    (tmp_path / "half.idx").write_bytes(index)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "listed.txt").write_text("1.0 absent")
    (tmp_path / "legacy" / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "runs" / "iter_0000010").mkdir(parents=True)
    (tmp_path / "runs" / "iter_0000010" / "metadata.json").write_text("{}")
    for name, weights in (
        ("llama", "model.safetensors.index.json"),
        ("llama-bin", "pytorch_model-00001-of-00002.bin"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / weights).touch()
    return tmp_path


LOCAL = "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir local"
# fmt: off
MISTAKES = {
    "two dtypes": ("--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
    "sizes that do not nest": (
        "--asynchzp-param-shard-size 4 --asynchzp-optim-shard-size 2", "does not nest"),
    "ranks that the model does not divide": (
        "--tensor-model-parallel-size 3", "4 ranks are not a multiple"),
    "a batch that the ranks do not divide": (
        "--micro-batch-size 2 --global-batch-size 12", "use a multiple of 8"),
    "a batch that evaluation does not divide": (
        "--eval-micro-batch-size 3 --global-batch-size 8", "use a multiple of 12"),
    "saving without an interval": ("--save runs", "add --save-interval"),
    "saving into a file": ("--save file --save-interval 5", "file is a file; name a folder"),
    "saving below a file": (
        "--save file/runs --save-interval 5", "file is a file; name a folder"),
    "scalars into a file": ("--tensorboard-dir file", "file is a file; name a folder"),
    "saving beside training nowhere": ("--async-save", "--async-save without --save"),
    "saving beside training without the writer": (
        "--save runs --save-interval 5 --async-save --use-persistent-ckpt-worker",
        "megatron_asynchzp[resiliency]"),
    "passing checkpoints of a run that saves nothing": (
        "--non-persistent-save-interval 5", "without --save saves nothing; add --save"),
    "local checkpoints nowhere": (
        "--non-persistent-ckpt-type local", "add --non-persistent-local-ckpt-dir DIR"),
    "copies on the same node": (f"{LOCAL} --replication", "add --replication-jump RANKS"),
    "local checkpoints without the library": (LOCAL, "megatron_asynchzp[resiliency]"),
    "local checkpoints beside training": (
        f"{LOCAL} --save runs --save-interval 5 --async-save --async-strategy mcore",
        "local has not been tested with --async-save"),
    "a checkpoint of the older format": (
        "--load legacy", "of Megatron's format torch, not torch_dist; convert it"),
    "loading from a file": ("--load file", "--load file is a file"),
    "loading from within a checkpoint": (
        "--load runs/iter_0000010", "is one checkpoint; name the folder that it is in"),
    "loading from Hugging Face": (
        "--load llama", "asynchzp hf import --load llama --save FOLDER and give --load"),
    "loading weights from Hugging Face": (
        "--pretrained-checkpoint llama-bin", "hf import --load llama-bin --save FOLDER"),
    "a pretrained checkpoint that is a file": (
        "--pretrained-checkpoint file", "--pretrained-checkpoint file is a file"),
    "data that is not there": ("--data-path absent", "absent: no dataset there"),
    "one dataset of two that is not there": (
        "--train-data-path 0.5 good 0.5 absent", "--train-data-path absent: no dataset"),
    "data in a list that is not there": (
        "--data-args-path absent.txt", "--data-args-path absent.txt: no such file"),
    "listed data that is not there": (
        "--data-args-path listed.txt", "--data-args-path absent: no dataset there"),
    "a vocabulary that is not there": (
        "--tokenizer-type GPT2BPETokenizer --vocab-file absent.json --merge-file file",
        "--vocab-file absent.json: no such file"),
    "a tokenizer's model that is not there": (
        "--tokenizer-type Llama2Tokenizer --tokenizer-model no/model",
        "--tokenizer-model no/model: no such file"),
    "data with its ending": ("--data-path good.bin", "without .idx or .bin"),
    "half a dataset": ("--data-path half", "half.bin missing"),
    "an empty index": ("--data-path 1.0 empty", "empty.idx is empty"),
    "a foreign index": ("--data-path foreign", "foreign.idx is not the index"),
    "a dataset without tokens": ("--data-path hollow", "hollow.bin is empty"),
}
# fmt: on


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_changes_nothing(parse, folder, mistake):
    flags, fragment = MISTAKES[mistake]
    args = parse(flags, 4)
    before = dict(vars(args))
    with pytest.raises(ConfigurationError) as refused:
        checks.prepare_args(args)
    line = str(refused.value)
    assert fragment in line and "\n" not in line
    assert vars(args) == before


@pytest.mark.parametrize(
    "flags",
    [
        "--data-path 0.3 good 0.7 good --save runs --save-interval 5 --load runs",
        "--data-path s3://bucket/prefix --save s3://bucket/runs --save-interval 5",
        "--data-args-path listed.txt --sft --load nowhere --tensorboard-dir new/events",
        "--eval-micro-batch-size 2 --decrease-batch-size-if-needed --global-batch-size 9 "
        "--eval-global-batch-size 8",
    ],
)
def test_flags_without_a_mistake_are_taken(parse, folder, flags):
    (folder / "absent").touch()
    checks.prepare_args(parse(flags, 4))


@pytest.mark.parametrize("flag", ["--save-interval 5 --save", "--tensorboard-dir"])
def test_a_folder_that_cannot_be_written_to_is_named(parse, folder, monkeypatch, flag):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigurationError, match=f"{folder / 'runs'} cannot be written to; name"):
        checks.prepare_args(parse(f"{flag} runs/new", 4))
