# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Text becomes an indexed dataset that reads back as it was, or nothing at all."""

import contextlib
import gzip
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed import ranks
from scripts.train import prepare_data
from scripts.train.documents import read_documents
from scripts.train.prepare_data import BYTE_EOD, ByteEncoder, HuggingFaceEncoder, write_dataset

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


@settings(max_examples=40)
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


@pytest.mark.parametrize("total, shown", [(None, " 21.5 kB "), (43_000, " 21.5/43.0 kB ")])
def test_the_bar_says_how_much_there_is_where_that_is_known(total, shown, capsys):
    with contextlib.closing(prepare_data.with_progress([("a", bytes(21_500))] * 2, total)) as bar:
        next(bar), next(bar)
    said = capsys.readouterr().err
    assert shown in said and "?" not in said, said


def test_the_default_corpus_is_python_and_cut_at_the_byte_that_is_asked_for(tmp_path):
    arguments = ["--output-prefix", str(tmp_path / "stdlib"), "--max-bytes", "1500000"]
    assert prepare_data.main(arguments) == 0
    text = b"".join(bytes(document[:-1]) for document in read_back(tmp_path / "stdlib"))
    assert len(text) == 1_500_000 and text.count(b"def ") > 1000


@pytest.mark.parametrize("vocabulary, id_nbytes", [(2**16, 2), (2**16 + 1, 4)])
def test_a_hugging_face_tokenizers_ids_are_kept_in_as_few_bytes_as_hold_the_largest(
    vocabulary, id_nbytes, tmp_path
):
    from tokenizers import Tokenizer, models, pre_tokenizers

    end = vocabulary - 1
    words = {f"大{i}": i for i in range(end)} | {"<|end|>": end}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="大0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder := tmp_path / "tok").mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [1, 2**15, 2**16 - 2, end - 1]
    files = write_files(tmp_path, [" ".join(f"大{i}" for i in ids).encode()])
    prefix = tmp_path / "corpus"
    arguments = [*files, "--output-prefix", str(prefix), "--tokenizer", str(folder)]
    assert prepare_data.main(arguments) == 0
    assert read_back(prefix) == [[*ids, end]]
    assert Path(f"{prefix}.bin").stat().st_size == id_nbytes * (len(ids) + 1)


TEXTS = ["first", "größer, 大きい", "", "third\nwith two lines"]


def write_rows(folder: Path, suffix: str, texts: list[str], column: str = "text") -> str:
    """One row or line for each text, with another field beside it."""
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"number": list(range(len(texts))), column: texts})
        parquet.write_table(table, path)
    else:
        rows = [json.dumps({"number": i, column: text}) for i, text in enumerate(texts)]
        path.write_text("\n".join([*rows, "", ""]))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("column", ["text", "content"])
def test_each_line_of_json_and_each_row_of_parquet_is_a_document(tmp_path, suffix, column):
    rows, prefix = write_rows(tmp_path, suffix, TEXTS, column), tmp_path / "corpus"
    arguments = [rows, "--output-prefix", str(prefix), "--column", column]
    assert prepare_data.main(arguments) == 0
    assert read_back(prefix) == [[*text.encode(), BYTE_EOD] for text in TEXTS if text]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_column_that_is_not_there_is_named_with_the_flag(tmp_path, suffix, capsys):
    rows = write_rows(tmp_path, suffix, TEXTS, "content")
    assert prepare_data.main([rows, "--output-prefix", str(tmp_path / "corpus")]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "'text'" in line and "--column" in line and rows in line


ROWS = [{"number": i, "text": text} for i, text in enumerate(TEXTS)]
LINES = "\n".join(map(json.dumps, ROWS)).encode()
LIST, SPREAD = json.dumps(ROWS).encode(), json.dumps(ROWS, indent=1).encode()
MARK = "\ufeff".encode()
AS_ROWS = {
    "a.jsonl": LINES,
    "a.JSONL": LINES,
    "a.ndjson": LINES,
    "lines.json": LINES,
    "lines.JSON": b"\n" + LINES + b"\n\n",
    "list.json": LIST,
    "spread.json": SPREAD,
    "mark.jsonl": MARK + LINES,
    "mark.json": MARK + SPREAD,
    "windows.jsonl": LINES.replace(b"\n", b"\r\n") + b"\r\n",
    "packed.jsonl.gz": gzip.compress(LINES),
    "packed.JSON.GZ": gzip.compress(SPREAD),
    "twice.ndjson.gz": gzip.compress(LINES[:40]) + gzip.compress(LINES[40:]),
    "lines of no known name": LINES,
    "list.data": LIST,
    "spread.data": SPREAD,
    "packed.data": gzip.compress(LINES),
}


@pytest.mark.parametrize("name", AS_ROWS)
def test_rows_are_found_whatever_the_file_is_called(tmp_path, name):
    (tmp_path / name).write_bytes(AS_ROWS[name])
    found = [document.decode() for _, document in read_documents([tmp_path / name], None)]
    assert found == [text for text in TEXTS if text]


@pytest.mark.parametrize("name", ["a.txt", "a.TXT", "a.md", "a.log", "README", "a.txt.gz", "a.gz"])
@pytest.mark.parametrize(
    "text", ["größer\r\n\n大", "大" * 1366, "[Verse]\nand so on", "{\\rtf1 text}", "1"]
)
def test_text_is_one_document_whatever_the_file_is_called(tmp_path, name, text):
    packed = gzip.compress if name.endswith(".gz") else bytes
    for content in (text.encode(), MARK + text.encode()):
        (tmp_path / name).write_bytes(packed(content))
        ((_, found),) = read_documents([tmp_path / name], None)
        assert found.decode() == text


def test_a_folder_is_searched_for_every_name_that_is_known(tmp_path, capsys):
    for name in ("a.JSONL", "b.ndjson", "c.json.gz", "d.Txt"):
        content = b"text" if name == "d.Txt" else b'{"text": "text"}'
        packed = gzip.compress(content) if name.endswith(".gz") else content
        (tmp_path / name).write_bytes(packed)
    (tmp_path / "e.png").write_bytes(b"\x89PNG")
    prefix = tmp_path / "out" / "corpus"
    assert prepare_data.main([str(tmp_path), "--output-prefix", str(prefix)]) == 0
    assert read_back(prefix) == [[*b"text", BYTE_EOD]] * 4
    more = ["--suffix", "JSONL", "--output-prefix", str(prefix)]
    assert prepare_data.main([str(tmp_path), *more]) == 0
    assert len(read_back(prefix)) == 1


HALF = b'{"text": "half \\ud83d"}'
REFUSED = {
    "half.jsonl": (b'{"text": "a"}\n' + HALF, "half.jsonl, line 2 has half a character"),
    "half.json": (b"[" + HALF + b"]", "half.json, entry 1 has half a character"),
    "other.jsonl": (b'{"text": "a"}\n\n{"body": "b"}', "line 3 has no text under 'text'"),
    "list.jsonl": (SPREAD, "list.jsonl, line 1 is not JSON"),
    "spread.jsonl": (json.dumps(ROWS[0], indent=1).encode(), "line 1 is not JSON"),
    "cut.json": (SPREAD[:-9], "cut.json is not JSON"),
    "wrapped.json": (b'{"rows": []}', "wrapped.json has no text under 'text'"),
    "numbers.json": (b"[1, 2]", "entry 1 has no text"),
    "wide.jsonl": (LINES.decode().encode("utf-16"), "in UTF-16.*UTF-8"),
    "wide.txt": ("text".encode("utf-16"), "in UTF-16.*UTF-8"),
    "wide.log": ("text".encode("utf-16-le"), "zero bytes.*UTF-8"),
    "a.txt.zst": (b"\x28\xb5\x2f\xfd rest", "is zstd, not text; unpack"),
    "a.jsonl": (gzip.compress(LINES), "is compressed with gzip, which its name denies"),
    "a.jsonl.gz": (LINES, "is not compressed with gzip"),
    "cut.txt.gz": (gzip.compress(os.urandom(999))[:500], "cannot read .*cut.txt.gz"),
    "bad.txt.gz": (gzip.compress(b"text" * 99)[:-8] + b"\0" * 8, "cannot read .*CRC"),
    "a.zip": (b"PK\x03\x04 rest", "is zip, not text"),
    "a.txt.bz2": (b"BZh91AY", "is bzip2"),
    "a.tar.gz": (gzip.compress(b"name" + bytes(253) + b"ustar" + bytes(99)), "holds tar"),
    "a.csv": (b"text\na\n", "is a table; make lines of JSON"),
    "bad.parquet": (b"not parquet", "is not a parquet file"),
    "a.parquet": (b"version https://git-lfs.github.com", "pointer of git-lfs"),
    "model.bin": (bytes(99), "zero bytes"),
    "rows.Z": (b"\x1f\x9d\x90abc", "is no text in UTF-8"),
    "rows.lz": (b"LZIP\x01abc", "is no text in UTF-8"),
    "rows.pkl": (b"\x80\x04\x95abc", "is no text in UTF-8"),
    "latin.log": ("größer".encode("latin-1"), "is no text in UTF-8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_text_is_refused_in_one_line(tmp_path, name, capsys):
    content, line = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=line) as refusal:
        list(read_documents([tmp_path / name], None))
    assert "\n" not in str(refusal.value) and name in str(refusal.value)


def test_rows_of_parquet_are_found_under_another_name(tmp_path):
    os.rename(write_rows(tmp_path, ".parquet", TEXTS), tmp_path / "rows.jsonl")
    found = [document.decode() for _, document in read_documents([tmp_path / "rows.jsonl"], None)]
    assert found == [text for text in TEXTS if text]


def test_two_processes_write_the_same_dataset_as_one(tmp_path):
    texts = [f"document {number} " * (number % 7 + 1) for number in range(300)]
    rows, read = write_rows(tmp_path, ".jsonl", texts), []
    for workers in ("1", "2"):
        prefix = tmp_path / f"with{workers}"
        arguments = [rows, "--output-prefix", str(prefix), "--workers", workers]
        assert prepare_data.main(arguments) == 0
        read.append([Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx")])
    assert read[0] == read[1] and len(read_back(tmp_path / "with1")) == 300


def test_an_error_in_a_worker_is_one_line_too(tmp_path, capsys):
    encoder = HuggingFaceEncoder.__new__(HuggingFaceEncoder)  # fails before it tokenizes
    with pytest.raises(ConfigurationError, match="odd is not UTF-8 text"):
        list(prepare_data.encode_all([("odd", b"\xff" * 99)], encoder, workers=2))


@pytest.mark.parametrize(
    "make, output",
    [
        (lambda folder: [folder / "absent.txt"], "input does not exist"),
        # It opens, then fails to read: for root too.
        (lambda folder: ["/proc/self/mem"], "cannot read /proc/self/mem"),
        (lambda folder: write_files(folder, [b"", b""]), "every document is empty"),
        (lambda folder: [folder], "no .txt .md .rst .py .jsonl .ndjson .json "),
        (lambda folder: [*write_files(folder, [b"x"]), "--tokenizer", folder], "cannot load"),
        (lambda folder: 2 * ["--tokenizer", *write_files(folder, [b"x"])], "cannot load"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(make, output, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    arguments = [str(argument) for argument in make(tmp_path / "in")]
    out = tmp_path / "out"
    out.mkdir()
    assert prepare_data.main([*arguments, "--output-prefix", str(out / "corpus")]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("prepare_data: ") and output in line
    assert not list(out.iterdir())


def test_a_failure_midway_leaves_an_older_dataset_as_it_was(tmp_path):
    prefix = tmp_path / "corpus"
    write_dataset([("old", b"old text")], ByteEncoder(), prefix)

    def documents():
        yield "new", b"new text"
        raise ConfigurationError("cannot read the second")

    with pytest.raises(ConfigurationError):
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
    assert "prepare_data: interrupted" in log.read_text()
    assert not list(out.iterdir())


def _run_script(arguments: list[str], log: Path) -> None:
    """As the command, in a process that has imported Megatron already."""
    sys.argv = [str(SCRIPT), *arguments]
    with open(log, "w") as sys.stderr:
        runpy.run_path(str(SCRIPT), run_name="__main__")


def sets_of(flags: list[str], documents: int) -> list[int | None]:
    """Documents of the training, validation and test set, as Megatron shares them out; None for a
    set that it does not build."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    split = flags[flags.index("--split") + 1] if "--split" in flags else "969, 30, 1"
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return [place and round(place[1] * documents) - round(place[0] * documents) for place in matrix]


def test_the_printed_flags_leave_no_set_without_a_document():
    for documents in range(1, 1100):
        flags = prepare_data.split_flags(documents)
        train, *others = sets_of(flags, documents)
        assert train and 0 not in others
        # Megatron evaluates on a set that it did not build, unless told otherwise.
        assert (others[0] is None) == (flags[-2:] == ["--eval-iters", "0"])
        if 0 not in sets_of([], documents):
            assert flags == []


@pytest.mark.parametrize("documents", [1, 2, 16, 17, 501])
def test_megatron_builds_the_sets_of_the_printed_flags(documents, tmp_path, capsys):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    rows, prefix = write_rows(tmp_path, ".jsonl", ["text"] * documents), tmp_path / "corpus"
    assert prepare_data.main([rows, "--output-prefix", str(prefix)]) == 0
    flags = capsys.readouterr().out.splitlines()[-1].split()
    assert 0 not in sets_of(flags, documents)  # or it would not end
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=64,
        blend=([flags[flags.index("--data-path") + 1]], None),
        split=flags[flags.index("--split") + 1] if "--split" in flags else "969, 30, 1",
        tokenizer=SimpleNamespace(
            vocab_size=BYTE_EOD + 1, eod=BYTE_EOD, pad=-1, unique_identifiers={}
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    evaluated = 0 if "--eval-iters" in flags else 32
    sizes = [64, evaluated, evaluated]
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    assert all(one is None or len(one) >= size for one, size in zip(built, sizes))
    assert len(built[0][0]["tokens"]) == 64
