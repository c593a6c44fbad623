# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how the documents of a file are found, by what it holds and by its name. Knows no tokens."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron_asynchzp.errors import ConfigurationError, require

PLAIN, _LINES, _ROWS = (".txt", ".md", ".rst", ".py"), (".jsonl", ".ndjson"), ".parquet"
_ANY_JSON, _GZIP = ".json", ".gz"
_UNCOMPRESSED = (*PLAIN, *_LINES, _ANY_JSON)
TEXT_SUFFIXES = (*_UNCOMPRESSED, *(f"{suffix}{_GZIP}" for suffix in _UNCOMPRESSED), _ROWS)
# How files begin that are no text, whatever their name. Nothing else reads them by mistake: a byte
# tokenizer takes any bytes.
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PAR1": "parquet",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf": "7-Zip",
    b"ARROW1": "Arrow",
    b"MMIDIDX": "a Megatron index",
    b"%PDF": "PDF",
    b"SQLite format": "SQLite",
    b"\x89PNG": "PNG",
    b"\x89HDF": "HDF5",
    b"\x93NUMPY": "NumPy",
    b"Obj\x01": "Avro",
    b"version https://git-lfs": "a pointer of git-lfs",
}
_TABLES = (".csv", ".tsv")
_HEAD = 4096  # bytes that tell what a file is
_CONTROLS = frozenset(range(8))
_UTF16, _UTF8_MARK = (b"\xff\xfe", b"\xfe\xff"), b"\xef\xbb\xbf"


def read_documents(
    files: Iterable[Path], max_bytes: int | None, column: str = "text"
) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each document that is not empty, `max_bytes` in all.

    column: where the text is in a line of JSON, or in a parquet file.
    """
    left = max_bytes
    for path in files:
        try:
            for name, whole in _read_file(path, column, left):
                document = whole[:left]
                if document:
                    yield name, document
                if left is not None:
                    left -= len(document)
                    if left <= 0:
                        return
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(f"cannot read {path}: {reason}") from error


def _read_file(path: Path, column: str, limit: int | None) -> Iterator[tuple[str, bytes]]:
    """The documents of a file, by what it holds and, where that may be either, by its name."""
    name = path.name.lower()
    with path.open("rb") as raw:
        kind = _kind_of(raw)
    if name.removesuffix(_GZIP).endswith(_TABLES):
        raise ConfigurationError(f"{path} is a table; make lines of JSON of it (.jsonl)")
    if kind not in (None, "gzip", "parquet"):
        raise ConfigurationError(f"{path} is {kind}, not text; unpack it or convert it to UTF-8")
    if kind == "parquet" or name.endswith(_ROWS):
        yield from _read_parquet(path, column)
        return
    if (kind == "gzip") != name.endswith(_GZIP) and name.endswith((*_UNCOMPRESSED, _GZIP)):
        raise ConfigurationError(
            f"{path} is {'' if kind else 'not '}compressed with gzip, which its name denies"
        )
    with gzip.open(path) if kind else path.open("rb") as opened:
        file = cast("BinaryIO", opened)
        inside = _kind_of(file)
        if inside is not None:
            raise ConfigurationError(f"{path} holds {inside}, not text; unpack or convert it")
        name = name.removesuffix(_GZIP)
        is_known = name.endswith((*PLAIN, *_LINES, _ANY_JSON))
        if name.endswith(PLAIN) or not (is_known or _is_json(file)):
            if not is_known:
                _refuse_binary(path, file)
            yield str(path), file.read(-1 if limit is None else limit)
        elif name.endswith(_LINES) or _begins_with_an_object(file):
            yield from _read_json_lines(path, file, column)
        else:
            yield from _read_json(path, file, column)


def _kind_of(file: BinaryIO) -> str | None:
    """Name the kind of a file that is no text, or None; pass over the mark of UTF-8."""
    file.seek(0)
    head = file.read(_HEAD)
    file.seek(len(_UTF8_MARK) if head.startswith(_UTF8_MARK) else 0)
    if head.startswith(_UTF16):
        return "in UTF-16 or UTF-32"
    if head[257:262] == b"ustar":
        return "tar"
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


def _refuse_binary(path: Path, file: BinaryIO) -> None:
    """For a file whose name promises no text."""
    start = file.tell()
    head = file.read(_HEAD)
    file.seek(start)
    if b"\0" in head:
        raise ConfigurationError(f"{path} holds zero bytes, as no text does; convert it to UTF-8")
    try:
        head.decode()
        is_text = True
    except UnicodeDecodeError as error:
        is_text = error.start >= _HEAD - 3  # a character that the head cuts in two
    if not is_text or _CONTROLS.intersection(head):
        raise ConfigurationError(f"{path} is no text in UTF-8; unpack or convert it")


def _is_json(file: BinaryIO) -> bool:
    """Whether a file of unknown name is JSON, or begins with a line of it."""
    start = file.tell()
    is_possible = file.read(_HEAD).lstrip()[:1] in (b"{", b"[")
    file.seek(start)
    if not is_possible:
        return False
    for text in (_first_line(file)[0], None):
        try:
            return isinstance(json.loads(file.read() if text is None else text), dict | list)
        except (ValueError, RecursionError):
            continue
        finally:
            file.seek(start)
    return False


def _begins_with_an_object(file: BinaryIO) -> bool:
    """Whether its first line is an object by itself, and more follows: lines of JSON."""
    line, is_last = _first_line(file)
    try:
        return not is_last and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _first_line(file: BinaryIO) -> tuple[bytes, bool]:
    """The first line that is not empty, and whether no other follows. Leaves the file as it was."""
    start = file.tell()
    lines = (line for line in file if line.strip())
    line = next(lines, b"")
    is_last = next(lines, None) is None
    file.seek(start)
    return line, is_last


def _read_json_lines(path: Path, file: BinaryIO, column: str) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            name = f"{path}, line {number}"
            yield name, _text_of(_parsed(line, name), column, name)


def _read_json(path: Path, file: BinaryIO, column: str) -> Iterator[tuple[str, bytes]]:
    """A list of objects, or one object, over any number of lines; held in memory."""
    whole = _parsed(file.read(), str(path))
    if not isinstance(whole, list):
        yield str(path), _text_of(whole, column, str(path))
        return
    for number, row in enumerate(whole, 1):
        name = f"{path}, entry {number}"
        yield name, _text_of(row, column, name)


def _parsed(text: bytes, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name} is not JSON: {error}") from error


def _text_of(row: Any, column: str, name: str) -> bytes:
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ConfigurationError(
            f"{name} has no text under {column!r}; --column names another field"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{name} has half a character ({text[error.start]!a}) under {column!r}, which is no "
            "Unicode text; remove it"
        ) from error


def _read_parquet(path: Path, column: str) -> Iterator[tuple[str, bytes]]:
    require("pyarrow", str(path))
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise ConfigurationError(f"{path} is not a parquet file") from error
    with file:
        names = file.schema_arrow.names
        if column not in names:
            raise ConfigurationError(
                f"{path} has no column {column!r}; --column names one of {', '.join(names)}"
            )
        rows = (row for batch in file.iter_batches(columns=[column]) for row in batch[0])
        number = 0
        try:
            for number, row in enumerate(rows, 1):
                text, name = row.as_py(), f"{path}, row {number}"
                if not isinstance(text, str | None):
                    raise ConfigurationError(f"{name} is not text; --column names another column")
                yield name, (text or "").encode()
        except (ArrowException, UnicodeError) as error:
            raise ConfigurationError(f"{path} is damaged at row {number}: {error}") from error
