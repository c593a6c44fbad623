# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Turns text into Megatron's indexed dataset (PREFIX.bin, PREFIX.idx).

A text file is one document; each line of a .jsonl or .ndjson file, each entry of a list in a .json
file and each row of a .parquet file is one; each is closed by the end-of-document token. Files may
be compressed with gzip (.gz). Files of other names are looked into. Without inputs it takes the
sources of Python's own standard library: real text that is on every machine.
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import accumulate, batched, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_asynchzp.errors import ConfigurationError, require
from scripts.train.documents import PLAIN, TEXT_SUFFIXES, read_documents

BYTE_EOD = 256  # the ids below are the bytes themselves
# Training, validation, test in thousandths: Megatron's own --split, and what few documents need.
_SPLITS = ((969, 30, 1), (969, 31, 0), (1000, 0, 0))
_BATCH = 64  # documents that a worker gets at once
# Not text anyone would learn from: installed packages, and tests with odd encodings.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Summary(NamedTuple):
    documents: int
    tokens: int


class Encoder(Protocol):
    """From the bytes of one document to its token ids, the end-of-document token included."""

    @property
    def dtype(self) -> type[np.number]: ...

    def encode(self, document: bytes, name: str) -> np.ndarray: ...

    def training_flags(self) -> list[str]: ...


class ByteEncoder:
    """Makes every byte a token.

    Megatron's command line offers no byte tokenizer: NullTokenizer carries the vocabulary's size,
    and its end-of-document id is the last one, 256.
    """

    dtype = np.uint16

    def encode(self, document: bytes, name: str) -> np.ndarray:
        return np.append(np.frombuffer(document, np.uint8).astype(np.uint16), np.uint16(BYTE_EOD))

    def training_flags(self) -> list[str]:
        return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(BYTE_EOD + 1)]


class HuggingFaceEncoder:
    """A tokenizer that transformers can load; a local folder works offline."""

    def __init__(self, name_or_path: str):
        require("transformers", f"--tokenizer {name_or_path}")
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        except Exception as error:  # transformers raises many kinds; all mean the same to the user
            reason = str(error).strip().split("\n")[0]
            raise ConfigurationError(f"cannot load tokenizer {name_or_path}: {reason}") from error
        self._name = name_or_path
        self._eod = self._tokenizer.eos_token_id
        if self._eod is None:
            raise ConfigurationError(f"tokenizer {name_or_path} has no end-of-text token")
        self.dtype = np.uint16 if len(self._tokenizer) <= 2**16 else np.int32

    def encode(self, document: bytes, name: str) -> np.ndarray:
        try:
            text = document.decode()
        except UnicodeDecodeError as error:
            if error.start < len(document) - 3:
                raise ConfigurationError(
                    f"{name} is not UTF-8 text (byte {error.start})"
                ) from error
            text = document[: error.start].decode()  # --max-bytes cut a character in two
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array([*ids, self._eod], dtype=self.dtype)

    def training_flags(self) -> list[str]:
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self._name]


def split_flags(documents: int) -> list[str]:
    """Return the flags about the three sets that this number of documents needs.

    Megatron never ends building a set that has a weight but no document; with none to evaluate it
    fails where it evaluates.
    """
    split = next(split for split in _SPLITS if _fills_all(split, documents))
    flags = ["--split", ",".join(map(str, split))] if split != _SPLITS[0] else []
    return flags if split[1] else [*flags, "--eval-iters", "0"]


def _fills_all(split: tuple[int, ...], documents: int) -> bool:
    """Whether each set with a weight gets a document, by Megatron's rounding."""
    shares = [weight / sum(split) for weight in split]
    edges = [round(end * documents) for end in accumulate(shares, initial=0.0)]
    return all(first < end for weight, (first, end) in zip(split, pairwise(edges)) if weight)


def standard_library() -> list[Path]:
    """The sources of this Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        path
        for path in root.rglob("*.py")
        if not STDLIB_EXCLUDED.intersection(path.relative_to(root).parts)
    ]
    if not found:
        raise ConfigurationError(f"no standard library sources under {root}; name your own input")
    return sorted(found)


def list_files(inputs: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Files as given, and the files with one of `suffixes` in each folder, sorted by path."""
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = [
                p for p in path.rglob("*") if p.name.lower().endswith(suffixes) and p.is_file()
            ]
            if not inside:
                raise ConfigurationError(f"no {' '.join(suffixes)} file in folder {path}")
            files += sorted(inside)
        elif path.exists():
            files.append(path)
        else:
            raise ConfigurationError(f"input does not exist: {path}")
    return files


def encode_all(
    documents: Iterable[tuple[str, bytes]], encoder: Encoder, workers: int = 1
) -> Iterator[np.ndarray]:
    """Yield the token ids of each document, in order, from `workers` processes."""
    if workers == 1:
        yield from (encoder.encode(document, name) for name, document in documents)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (encoder,))
    pending: deque[Future[list[np.ndarray]]] = deque()
    try:
        for batch in batched(documents, _BATCH):
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_encoder_of_worker: list[Encoder] = []  # in a worker process, which has one for its whole life


def _start_worker(encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends its workers
    _encoder_of_worker[:] = [encoder]


def _encode_in_worker(batch: tuple[tuple[str, bytes], ...]) -> list[np.ndarray]:
    return [_encoder_of_worker[0].encode(document, name) for name, document in batch]


def write_dataset(
    documents: Iterable[tuple[str, bytes]], encoder: Encoder, prefix: Path, workers: int = 1
) -> Summary:
    """Write PREFIX.bin and PREFIX.idx, complete or not at all.

    They are written under other names in the same folder and renamed at the end, the index last,
    since without its index a .bin is no dataset. An older dataset of that name stays as it was
    until then.
    """
    # Warnings about accelerators from the imports of torch and Megatron do not matter here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    final_bin, final_idx = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    new_bin = prefix.with_name(f".{prefix.name}.{os.getpid()}.bin")
    new_idx = prefix.with_name(f".{prefix.name}.{os.getpid()}.idx")
    tokens = count = 0
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(str(new_bin), dtype=encoder.dtype)
        data_file: Any = builder.data_file
        with contextlib.closing(data_file):
            for ids in encode_all(documents, encoder, workers):
                builder.add_document(ids, [len(ids)])  # pyright: ignore[reportArgumentType]
                tokens += len(ids)
                count += 1
            if not count:
                raise ConfigurationError("the input holds no text: every document is empty")
            builder.finalize(str(new_idx))
        final_idx.unlink(missing_ok=True)
        new_bin.replace(final_bin)
        new_idx.replace(final_idx)
    except OSError as error:
        raise ConfigurationError(f"cannot write {prefix}: {error.strerror or error}") from error
    finally:
        new_bin.unlink(missing_ok=True)
        new_idx.unlink(missing_ok=True)
    return Summary(count, tokens)


def with_progress(
    documents: Iterable[tuple[str, bytes]], total_nbytes: int | None
) -> Generator[tuple[str, bytes], None, None]:
    """The same documents, with a bar in bytes on standard error while they are consumed.

    total_nbytes: of text; None where files hold more than that, or compress it.
    """
    require("rich", "prepare_data")
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        FileSizeColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    amount = FileSizeColumn() if total_nbytes is None else DownloadColumn()
    columns = (TextColumn("Tokenizing"), BarColumn(), amount, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total_nbytes)
        for name, document in documents:
            yield name, document
            progress.advance(task, len(document))
        progress.update(task, total=progress.tasks[task].completed)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train.prepare_data", description=__doc__
    )
    parser.add_argument(
        "inputs", nargs="*", type=Path, help="files of text, JSON or .parquet, and folders"
    )
    parser.add_argument("--output-prefix", type=Path, required=True, metavar="PREFIX")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="bytes|NAME_OR_PATH",
        help="bytes (default), or a Hugging Face tokenizer",
    )
    parser.add_argument(
        "--column",
        default="text",
        help="field of a line of JSON, or column of a parquet file, with the text (default text)",
    )
    parser.add_argument(
        "--workers", type=_positive, default=1, help="processes that tokenize (default 1)"
    )
    parser.add_argument("--max-bytes", type=_positive, help="stop after this much input")
    parser.add_argument(
        "--suffix",
        action="append",
        metavar=".EXT",
        help=f"files of a folder to take; may be repeated (default {' '.join(TEXT_SUFFIXES)})",
    )
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> str:
    """Do what the command line asks; returns what to print."""
    if not args.output_prefix.name:
        raise ConfigurationError(f"--output-prefix must end in a name: {args.output_prefix}")
    suffixes = tuple(f".{s.lower().removeprefix('.')}" for s in args.suffix or TEXT_SUFFIXES)
    files = list_files(args.inputs, suffixes) if args.inputs else standard_library()
    encoder = ByteEncoder() if args.tokenizer == "bytes" else HuggingFaceEncoder(args.tokenizer)
    total = sum(path.stat().st_size for path in files)
    documents = read_documents(files, args.max_bytes, args.column)
    is_text = all(path.name.lower().endswith(PLAIN) for path in files)
    shown = with_progress(documents, min(total, args.max_bytes or total) if is_text else None)
    with contextlib.closing(shown):
        summary = write_dataset(shown, encoder, args.output_prefix, args.workers)
    flags = " ".join(
        [
            *("--data-path", str(args.output_prefix)),
            *encoder.training_flags(),
            *split_flags(summary.documents),
        ]
    )
    return (
        f"{args.output_prefix}.bin, .idx: {summary.documents:,} documents, "
        f"{summary.tokens:,} tokens\nFlags for training: {flags}"
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    try:
        print(prepare(args))
    except ConfigurationError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare_data: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
