# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks Megatron's arguments before Megatron builds anything. Loads no torch, no Megatron."""

import os
import re
from argparse import Namespace
from collections.abc import Iterator
from math import lcm, prod
from pathlib import Path

from megatron_asynchzp.checkpoint_files.other_format import (
    OTHER_FORMAT,
    all_of_format_torch,
    is_hugging_face,
)
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.errors import ConfigurationError, raise_first, require
from megatron_asynchzp.mcore.flags.arguments import config_of
from megatron_asynchzp.mcore.flags.config import AUTO, NODE, STATES, WORLD
from megatron_asynchzp.mcore.flags.rule_table import (
    change_settings,
    refuse_changes,
    refuse_unsupported,
)
from megatron_asynchzp.mcore.flags.shard_sizes import (
    describe_cuts,
    describe_translation,
    resolve_shard_sizes,
    sharding_group_size,
    sharding_ranks_per_node,
)


def prepare_args(args: Namespace) -> list[str]:
    """Check all arguments, then change some, before Megatron validates them; return lines to log.

    The resolved shard sizes are written into `args`, unless the planner is to choose some after
    Megatron's validation. Raises ConfigurationError, one line, for a run that cannot start.
    """
    refuse_unsupported(args)
    config = config_of(args)
    raise_first(config.faults_of_cluster())
    sizes, group_size = check_sizes(args), sharding_group_size(args)
    for faults in (faults_of_dtypes, faults_of_files, faults_of_saves, faults_of_muon):
        raise_first(faults(args))
    lines = describe_translation(args, sizes, group_size)
    is_chosen_later = bool(config.states_of_size(AUTO))
    lines += [] if is_chosen_later else describe_cuts(sizes, group_size)
    for state in config.states_of_size(NODE, WORLD) if is_chosen_later else STATES:
        setattr(args, f"asynchzp_{state}_shard_size", getattr(sizes, state))
    return lines + change_settings(args)


def confirm_args(args: Namespace) -> None:
    """Raise ConfigurationError for a setting that Megatron's validation switched on again."""
    refuse_unsupported(args)
    refuse_changes(args)


def check_is_rank() -> None:
    """Raise ConfigurationError if this process is to train and no launcher made it a rank."""
    if missing := [name for name in _OF_A_RANK if name not in os.environ]:
        raise ConfigurationError(
            f"{', '.join(missing)} not set: this process is no rank of a run; start it with "
            "asynchzp launch --nproc-per-node N SCRIPT (or torchrun) on each node, also within srun"
        )


_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# ---- sizes


def check_sizes(args: Namespace, ranks_per_node: int | None = None) -> ShardSizes:
    """Return the shard sizes of `args.world_size` ranks, or refuse sizes or a batch."""
    raise_first(faults_of_sizes(args))
    on_node = sharding_ranks_per_node(args, ranks_per_node)
    return resolve_shard_sizes(config_of(args), args, sharding_group_size(args), on_node)


def faults_of_sizes(args: Namespace) -> Iterator[str]:
    """Name a world and batches that the parallel sizes do not divide."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    layers = {"tensor-model": tensor, "pipeline-model": pipeline}
    layers["context"] = args.context_parallel_size
    experts = {"expert-tensor": args.expert_tensor_parallel_size or tensor}
    experts |= {"expert-model": args.expert_model_parallel_size, "pipeline-model": pipeline}
    needed = lcm(prod(layers.values()), prod(experts.values()))
    for sizes in (layers, experts):
        if args.world_size % (size := prod(sizes.values())):
            flags = " x ".join(f"--{name}-parallel-size" for name in sizes)
            yield (
                f"{args.world_size} ranks are not a multiple of {flags} = {size}; start {needed} "
                "ranks or a multiple of it"
            )
    if args.hybrid_context_parallel:
        yield from _faults_of_sub_samples(args, args.world_size // (tensor * pipeline))
    ranks = args.world_size // prod(layers.values())
    micro, batch = args.micro_batch_size, args.global_batch_size
    eval_micro, eval_batch = args.eval_micro_batch_size, args.eval_global_batch_size
    is_rounded = args.decrease_batch_size_if_needed and batch and batch >= (micro or 1) * ranks
    # Evaluation has the batch of training by default, before Megatron rounds that.
    checked = ("eval-global", eval_batch or batch, "eval-micro" if eval_micro else "micro")
    for name, whole, per, part in (
        ("global", None if is_rounded else batch, "micro", micro),
        (*checked, eval_micro or micro),
    ):
        if part and whole and whole % (part * ranks):
            yield (
                f"--{name}-batch-size {whole} is not a multiple of --{per}-batch-size {part} x "
                f"{ranks} data-parallel ranks; use a multiple of {part * ranks}"
            )


def _faults_of_sub_samples(args: Namespace, ranks: int) -> Iterator[str]:
    flag, longest = "--hybrid-context-parallel", args.max_seqlen_per_dp_cp_rank
    if ranks < 2 or ranks & (ranks - 1):
        yield (
            f"{flag} with {ranks} data x context parallel ranks: Megatron has groups of 2, 4, 8 "
            "and so on; start as many ranks"
        )
    if not longest:
        yield f"{flag}: add --max-seqlen-per-dp-cp-rank TOKENS"
    elif args.seq_length and args.seq_length > longest * ranks:
        yield (
            f"{flag} with --max-seqlen-per-dp-cp-rank {longest}: {ranks} ranks hold no sub-sample "
            f"of --seq-length {args.seq_length}; give {-(-args.seq_length // ranks)} or more"
        )


def faults_of_dtypes(args: Namespace) -> Iterator[str]:
    if args.bf16 and args.fp16:
        yield "--bf16 and --fp16 exclude each other; give one of them"


# ---- checkpoints


def faults_of_saves(args: Namespace) -> Iterator[str]:
    """Name flags of checkpoints that would fail at the first save, or save nothing."""
    if args.save and args.save_interval is None:
        yield (
            "--save without --save-interval: Megatron fails after the last step; add "
            "--save-interval STEPS"
        )
    for name in ("non_persistent_save_interval", "async_save"):
        if getattr(args, name) and not args.save:
            yield f"{_flag(name)} without --save saves nothing; add --save FOLDER"
    local = "--non-persistent-ckpt-type local"
    if args.non_persistent_ckpt_type == "local":
        if not args.non_persistent_local_ckpt_dir:
            yield (
                f"{local}: add --non-persistent-local-ckpt-dir DIR, a folder on each node's own "
                "disk or in its memory"
            )
        if args.replication and not args.replication_jump:
            yield (
                "--replication: add --replication-jump RANKS: as many as a node has, so that "
                "copies are on other nodes"
            )
        if args.async_save:
            yield f"{local} has not been tested with --async-save; leave one of them out"
        require("nvidia_resiliency_ext", local)
    if args.async_save and args.use_persistent_ckpt_worker and args.async_strategy == "nvrx":
        require("nvidia_resiliency_ext", "--async-save without --async-strategy mcore")


# ---- files of this machine


def faults_of_files(args: Namespace) -> Iterator[str]:
    """Name files that are missing or wrong, and folders that cannot be written to or read."""
    # A folder for --load without a checkpoint is a run from the beginning.
    for flag, path in _argument_files(args):
        if not Path(path).is_file():
            yield f"{flag} {path}: no such file"
    for flag, prefix in _dataset_prefixes(args):
        for fault in _faults_of_dataset(prefix, [""] if args.sft else [".idx", ".bin"]):
            yield f"{flag} {prefix}: {fault}; {_MAKE_DATA}"
    for name in ("save", "tensorboard_dir"):
        word = getattr(args, name)
        for fault in _faults_of_target(word) if word and "://" not in word else ():
            yield f"{_flag(name)} {word}: {fault}"
    for name in ("load", "pretrained_checkpoint"):
        word = getattr(args, name)
        for fault in _faults_of_source(_flag(name), Path(word)) if word else ():
            yield f"{_flag(name)} {word}{fault}"


_MAKE_DATA = (
    "make one with our scripts/train/prepare_data.py or Megatron's tools/preprocess_data.py, and "
    "give its path without .idx or .bin"
)
# How the index of a dataset begins (megatron.core.datasets.indexed_dataset).
_INDEX_HEADER = b"MMIDIDX\x00\x00"


def _faults_of_dataset(prefix: str, endings: list[str]) -> Iterator[str]:
    paths = [Path(prefix + ending) for ending in endings]
    if missing := [str(path) for path in paths if not path.is_file()]:
        yield f"no dataset there ({' and '.join(missing)} missing)"
    if len(paths) == 1:
        return
    index, data = paths
    with index.open("rb") as file:
        header = file.read(len(_INDEX_HEADER))
    if header != _INDEX_HEADER:
        fault = "is empty" if not header else "is not the index of a Megatron dataset"
        yield f"{index.name} {fault}"
    if not data.stat().st_size:
        yield f"{data.name} is empty"


def _faults_of_target(word: str) -> Iterator[str]:
    """Megatron makes the folder when the model has been built, or at the first checkpoint."""
    path = Path(word).absolute()
    nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        yield f"{nearest} is a file; name a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{nearest} cannot be written to; name another folder"


def _faults_of_source(flag: str, folder: Path) -> Iterator[str]:
    if folder.exists() and not folder.is_dir():
        yield " is a file; name a folder of checkpoints"
    if all_of_format_torch(folder):
        yield f": {OTHER_FORMAT}"
    if is_hugging_face(folder):
        yield (
            " is a model of Hugging Face, from which Megatron loads nothing; make a checkpoint of "
            f"it with asynchzp hf import --load {folder} --save FOLDER and give {flag} FOLDER"
        )
    if _CHECKPOINT.fullmatch(folder.name) and (folder / "metadata.json").is_file():
        yield " is one checkpoint; name the folder that it is in, and choose it with --ckpt-step"


_CHECKPOINT = re.compile(r"iter_\d{7,}|release")


def faults_of_tokens(args: Namespace) -> Iterator[str]:
    """Name data with ids beyond `args.padded_vocab_size`, by a sample where data is large."""
    size = args.padded_vocab_size
    if args.sft or args.mock_data or not size:
        return
    for flag, prefix in _dataset_prefixes(args):
        seen = _ids_seen(Path(prefix + ".idx"), Path(prefix + ".bin"))
        if foreign := [token for token in seen if not 0 <= token < size]:
            yield (
                f"{flag} {prefix}: it holds the token {foreign[-1]}, and the vocabulary has {size} "
                "with its padding; give --tokenizer-type, --tokenizer-model or --vocab-size as "
                "when it was made"
            )


def _ids_seen(index: Path, data: Path) -> list[int]:
    """Return the smallest and the largest token of the sample."""
    from numpy import dtype, memmap

    with index.open("rb") as file:
        kind = _TOKEN_DTYPES.get(file.read(len(_INDEX_HEADER) + 9)[-1])  # behind a version
    if kind is None or not (number := data.stat().st_size // dtype(kind).itemsize):
        return []
    tokens = memmap(data, kind, "r", shape=(number,))
    starts = range(0, number, max(_TOKENS_SEEN, number // _PLACES_SEEN))
    seen = [tokens[start : start + _TOKENS_SEEN] for start in starts]
    return [int(min(part.min() for part in seen)), int(max(part.max() for part in seen))]


_TOKEN_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}  # Megatron's codes
_PLACES_SEEN, _TOKENS_SEEN = 64, 2**15


def _argument_files(args: Namespace) -> list[tuple[str, str]]:
    names = ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path")
    names += ("vocab_file", "merge_file")
    if args.tokenizer_type in _TOKENIZERS_OF_A_FILE:
        names += ("tokenizer_model",)
    return [(_flag(name), getattr(args, name)) for name in names if getattr(args, name)]


_TOKENIZERS_OF_A_FILE = (
    "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer",
)  # fmt: skip


def _dataset_prefixes(args: Namespace) -> Iterator[tuple[str, str]]:
    """Yield the datasets of the run with their flags, without those in object storage."""
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    lists = [(name, getattr(args, name) or []) for name in names]
    if args.data_args_path:
        lists.append(("data_args_path", Path(args.data_args_path).read_text().split()))
    for name, words in lists:
        is_weighted = len(words) % 2 == 0 and all(map(_is_number, words[::2]))
        prefixes = words[1::2] if is_weighted else words
        yield from ((_flag(name), prefix) for prefix in prefixes if "://" not in prefix)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# ---- Muon


def faults_of_muon(args: Namespace) -> Iterator[str]:
    """Name coefficients that Muon's package does not know. Raises MissingPackage without it."""
    if args.optimizer not in ("muon", "dist_muon"):
        return
    require("emerging_optimizers", f"--optimizer {args.optimizer}")
    from megatron.core.optimizer.emerging_optimizers import get_supported_coefficient_types

    try:
        known = get_supported_coefficient_types()
    except AssertionError as error:  # it lacks a name that Megatron imports
        remedy = 'pip install --upgrade "megatron_asynchzp[muon]"'
        yield f"--optimizer {args.optimizer}: {error}; {remedy}"
        return
    if args.muon_coefficient_type not in known:
        yield (
            f"--muon-coefficient-type {args.muon_coefficient_type} is not known to the "
            f"emerging-optimizers that is installed; use one of {', '.join(known)}"
        )
