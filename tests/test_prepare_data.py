# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Text becomes an indexed dataset that reads back as it was, or nothing at all."""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_asynchzp.testbed import ranks
from megatron_asynchzp.tools import prepare_data
from megatron_asynchzp.tools.prepare_data import BYTE_EOD, ByteEncoder, InputError, write_dataset

SCRIPT = Path(prepare_data.__file__)


def read_back(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))  # a file, a document
    return [dataset[i].tolist() for i in range(len(dataset))]


def write_files(folder: Path, documents: list[bytes]) -> list[str]:
    paths = [folder / f"{i:03d}.txt" for i in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_bytes(document)
    return [str(path) for path in paths]


@settings(max_examples=40, deadline=None)
@given(documents=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8))
def test_what_the_dataset_reads_back_is_what_went_in(documents, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    named = [(str(i), document) for i, document in enumerate(documents)]
    summary = write_dataset(named, ByteEncoder(), prefix)
    assert read_back(prefix) == [[*document, BYTE_EOD] for document in documents]
    assert summary == (len(documents), sum(len(d) + 1 for d in documents))


def test_empty_files_are_skipped_and_a_folder_is_read_in_order(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    write_files(tmp_path / "in", [b"first", b"", b"third"])
    (tmp_path / "in" / "image.png").write_bytes(b"not text")
    prefix = tmp_path / "out" / "corpus"
    assert prepare_data.main([str(tmp_path / "in"), "--output-prefix", str(prefix)]) == 0
    assert read_back(prefix) == [[*b"first", BYTE_EOD], [*b"third", BYTE_EOD]]
    assert f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 257" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("limit", [1, 5, 6, 11, 100])
def test_max_bytes_cuts_the_input_at_that_byte(limit, tmp_path):
    files = write_files(tmp_path, [b"hello", b"world!"])
    prefix = tmp_path / "corpus"
    arguments = [*files, "--output-prefix", str(prefix), "--max-bytes", str(limit)]
    assert prepare_data.main(arguments) == 0
    text = b"".join(bytes(document[:-1]) for document in read_back(prefix))
    assert text == b"helloworld!"[:limit]


def test_the_default_corpus_is_more_than_a_megabyte_of_python(tmp_path):
    prefix = tmp_path / "stdlib"
    arguments = ["--output-prefix", str(prefix), "--max-bytes", "1500000"]
    assert prepare_data.main(arguments) == 0
    documents = read_back(prefix)
    assert sum(map(len, documents)) > 1_000_000
    assert sum(bytes(d[:-1]).count(b"def ") for d in documents) > 1000


def test_a_hugging_face_tokenizer_from_a_local_folder(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer

    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<|end|>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (tmp_path / "tok").mkdir()
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(config))

    texts = ["größer, 大きい", "plain"]
    files = write_files(tmp_path, [text.encode() for text in texts])
    prefix = tmp_path / "corpus"
    arguments = [*files, "--output-prefix", str(prefix), "--tokenizer", str(tmp_path / "tok")]
    assert prepare_data.main(arguments) == 0
    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "tok"))
    documents = read_back(prefix)
    assert [loaded.decode(document[:-1]) for document in documents] == texts
    assert all(document[-1] == loaded.eos_token_id for document in documents)


@pytest.mark.parametrize(
    "make, output",
    [
        (lambda folder: [folder / "absent.txt"], "input does not exist"),
        (lambda folder: write_files(folder, [b"", b""]), "every file is empty"),
        (lambda folder: [folder], "no .txt .md .rst .py file in folder"),
        (lambda folder: [*write_files(folder, [b"x"]), "--tokenizer", folder], "cannot load"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(make, output, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    arguments = [str(argument) for argument in make(tmp_path / "in")]
    out = tmp_path / "out"
    out.mkdir()
    assert prepare_data.main([*arguments, "--output-prefix", str(out / "corpus")]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("asynchzp prepare-data: ") and output in line
    assert not list(out.iterdir())


def test_an_unreadable_file_is_named(tmp_path, capsys):
    unreadable = "/proc/self/mem"  # opens, then fails to read: for root too
    assert prepare_data.main([unreadable, "--output-prefix", str(tmp_path / "corpus")]) == 2
    assert f"asynchzp prepare-data: cannot read {unreadable}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failure_midway_leaves_an_older_dataset_as_it_was(tmp_path):
    prefix = tmp_path / "corpus"
    write_dataset([("old", b"old text")], ByteEncoder(), prefix)

    def documents():
        yield "new", b"new text"
        raise InputError("cannot read the second")

    with pytest.raises(InputError):
        write_dataset(documents(), ByteEncoder(), prefix)
    assert read_back(prefix) == [[*b"old text", BYTE_EOD]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_midway_leaves_nothing(stop, tmp_path):
    # A named pipe that nobody closes keeps the script in the middle of its work.
    write_files(tmp_path, [b"some text"])
    os.mkfifo(tmp_path / "endless.txt")
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = [tmp_path / "000.txt", tmp_path / "endless.txt", "--output-prefix", out / "c"]
    process = ranks.start_process(_run_script, list(map(str, arguments)), log)
    try:
        deadline = time.monotonic() + 60
        while not (out.exists() and list(out.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(out.iterdir())
        os.kill(process.pid, stop)
        process.join(30)
    finally:
        process.kill()
    assert process.exitcode == 130
    assert "asynchzp prepare-data: interrupted" in log.read_text()
    assert not list(out.iterdir())


def _run_script(arguments: list[str], log: Path) -> None:
    """As `asynchzp prepare-data`, in a process that has imported Megatron already."""
    sys.argv = [str(SCRIPT), *arguments]
    with open(log, "w") as sys.stderr:
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_ids_fit_the_vocabulary_that_the_printed_flags_declare():
    flags = ByteEncoder().training_flags()
    vocab_size = int(flags[flags.index("--vocab-size") + 1])
    ids = ByteEncoder().encode(bytes(range(256)), "all bytes")
    assert ids.max() == vocab_size - 1 and np.array_equal(ids[:-1], np.arange(256))
