# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the command line `python -m megatron_asynchzp.hf export | import`."""

import argparse
import logging
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from megatron_asynchzp.checkpoint_files.errors import one_line
from megatron_asynchzp.checkpoint_files.other_format import is_hugging_face
from megatron_asynchzp.errors import ConfigurationError, OneLineParser, require
from megatron_asynchzp.hf.output_folder import check_unoccupied

# As argparse exits for a wrong command line, and a shell for SIGINT.
_EXIT_FAILURE, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130


def main(argv: list[str]) -> None:
    args = _parser().parse_args(argv)
    # Megatron and torch warn of kernels that are not installed; a conversion uses none.
    warnings.filterwarnings("ignore")
    for name in ("torch.utils.cpp_extension", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        for package in ("transformers", "safetensors", "megatron"):
            require(package, f"asynchzp hf {args.command}")
        _check_folders(args)
        args.run(args)
    except ConfigurationError as error:
        _end(str(error), _EXIT_USAGE)
    except OSError as error:
        _end(str(error), _EXIT_FAILURE)
    except Exception as error:  # files of other programs may hold anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        position = f"{place.filename}, line {place.lineno}"
        _end(f"{args.load}: {type(error).__name__}: {one_line(error)} ({position})", _EXIT_FAILURE)
    except KeyboardInterrupt:
        _end("interrupted, nothing was written", _EXIT_INTERRUPTED)


def _check_folders(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for folders that cannot be meant, before torch is imported."""
    is_export = args.command == "export"
    check_unoccupied(args.output if is_export else args.save)
    if not args.load.is_dir():
        fault = "is a file; name a folder" if args.load.exists() else "no such folder"
    elif is_export and is_hugging_face(args.load):
        fault = "is a model of Hugging Face already; give a folder that Megatron saved into"
    elif is_export:
        names = [path.name for path in args.load.iterdir()]
        is_missing = not any(name.startswith(("iter_", "release", "latest_")) for name in names)
        fault = "there is no checkpoint of Megatron in it" if is_missing else ""
    else:
        is_missing = not (args.load / "config.json").is_file()
        fault = "there is no config.json in it; give a folder of Hugging Face" * is_missing
    if fault:
        raise ConfigurationError(f"--load {args.load}: {fault}")


def _end(text: str, status: int) -> NoReturn:
    print(f"megatron_asynchzp: {text}", file=sys.stderr, flush=True)
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="asynchzp hf",
        description="Convert models between Megatron checkpoints and Hugging Face directories.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|import")
    out = commands.add_parser("export", help="Megatron checkpoint -> Hugging Face directory")
    out.add_argument("--load", type=Path, required=True, metavar="DIR", help="--save of the run")
    out.add_argument("--ckpt-step", type=int, metavar="N", help="iteration (default: the newest)")
    read = "how much of the data is read to find damage, as --asynchzp-verify (default: full)"
    out.add_argument("--verify", choices=("full", "structure"), default="full", help=read)
    out.add_argument("--output", type=Path, required=True, metavar="HFDIR", help="new directory")
    rows = "rows of the embedding that are not padding, if the checkpoint does not say"
    out.add_argument("--vocab-size", type=int, metavar="N", help=rows)
    out.add_argument(
        "--adapter-alpha",
        type=float,
        metavar="ALPHA",
        help="merge low-rank adapters, scaled by ALPHA / rank (default: lora_alpha among the "
        "checkpoint's arguments)",
    )
    out.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="checkpoints with the frozen tensors, for those of a run with "
        "--asynchzp-save-trained-only",
    )
    size = "largest weight file, and so the memory used (default: 5)"
    out.add_argument("--max-file-gb", type=float, default=5.0, metavar="GB", help=size)
    out.set_defaults(run=_export)
    into = commands.add_parser("import", help="Hugging Face directory -> Megatron checkpoint")
    into.add_argument("--load", type=Path, required=True, metavar="HFDIR", help="model directory")
    into.add_argument("--save", type=Path, required=True, metavar="DIR", help="checkpoint folder")
    multiple = "as in Megatron (default: 128)"
    into.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=128, metavar="N", help=multiple
    )
    into.set_defaults(run=_import)
    for command in (out, into):
        command.add_argument("--dtype", choices=("bf16", "fp32"), help="default: as it is stored")
    return parser


def _show_progress(steps: Iterable, total: int) -> Iterator:
    from rich.console import Console
    from rich.progress import track

    console, is_terminal = Console(stderr=True), sys.stderr.isatty()
    yield from track(steps, "tensors", total, console=console, disable=not is_terminal)


def _export(args: argparse.Namespace) -> None:
    from megatron_asynchzp.checkpoint_files.verification import VerifyLevel
    from megatron_asynchzp.hf.export_model import export_model

    shape = export_model(
        args.load,
        args.output,
        step=args.ckpt_step,
        dtype=_dtype(args.dtype),
        vocab_size=args.vocab_size,
        level=VerifyLevel(args.verify),
        max_file_nbytes=int(args.max_file_gb * 10**9),
        progress=_show_progress,
        base=args.base,
        adapter_alpha=args.adapter_alpha,
    )
    sizes = f"{shape.num_layers} layers, vocabulary {shape.vocab_size}"
    print(f"{args.output}: {shape.family}, {sizes}")
    if not shape.is_vocab_known:
        rows = "All rows of the embedding were exported. If some are padding, add"
        print(f"{rows} --vocab-size N, the size of the tokenizer.")


def _import(args: argparse.Namespace) -> None:
    from megatron_asynchzp.hf.import_model import import_model
    from megatron_asynchzp.hf.shape import command_line

    shape = import_model(
        args.load,
        args.save,
        dtype=_dtype(args.dtype),
        vocab_multiple=args.make_vocab_size_divisible_by,
        progress=_show_progress,
    )
    print(f"{args.save}: {shape.family}, to be loaded with")
    flags = [f"--load {args.save}", "--finetune", "--ckpt-format torch_dist", *command_line(shape)]
    if any((args.load / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        flags += ["--tokenizer-type HuggingFaceTokenizer", f"--tokenizer-model {args.load}"]
    else:
        flags += ["--tokenizer-type NullTokenizer", f"--vocab-size {shape.vocab_size}"]
    flags += [f"--make-vocab-size-divisible-by {args.make_vocab_size_divisible_by}"]
    print("    " + " \\\n    ".join(flags))


def _dtype(word: str | None) -> Any:
    import torch

    return {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}[word]


if __name__ == "__main__":
    main(sys.argv[1:])
