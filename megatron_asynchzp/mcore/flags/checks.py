# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What must be right before Megatron builds anything: sizes, files, and what was installed.
Importing this file loads no torch and no Megatron.
"""

import os
import re
from argparse import Namespace
from collections.abc import Iterable
from math import lcm, prod
from pathlib import Path

from megatron_asynchzp.checkpoint_files.other_format import (
    OTHER_FORMAT,
    all_of_format_torch,
    is_hugging_face,
)
from megatron_asynchzp.errors import ConfigurationError, require
from megatron_asynchzp.mcore.flags.arguments import config_of
from megatron_asynchzp.mcore.flags.config import STATES
from megatron_asynchzp.mcore.flags.rule_table import (
    change_settings,
    refuse_changes,
    refuse_unsupported,
)
from megatron_asynchzp.mcore.flags.shard_sizes import (
    automatic_states,
    describe_cuts,
    describe_translation,
    resolve_shard_sizes,
    ruled_states,
    sharding_group_size,
    sharding_ranks_per_node,
)


def prepare_args(args: Namespace) -> list[str]:
    """Everything that happens to the arguments before Megatron validates (and prints) them.

    Writes the resolved shard sizes into `args`, unless the planner is to choose some when Megatron
    has validated the others (mcore/run/planned.py), and applies the rules; returns the lines
    to log on rank 0. Raises ConfigurationError, one line, for a run that cannot start, and has
    changed nothing then.
    """
    refuse_unsupported(args)
    refuse_sizes(args)
    config_of(args).check_cluster()
    group_size = sharding_group_size(args)
    sizes = resolve_shard_sizes(args, group_size, sharding_ranks_per_node(args))
    refuse_missing_data(args)
    refuse_useless_saves(args)
    refuse_missing_muon(args)
    lines = describe_translation(args, sizes, group_size)
    is_chosen_later = bool(automatic_states(args))
    lines += [] if is_chosen_later else describe_cuts(sizes, group_size)
    for state in ruled_states(args) if is_chosen_later else STATES:
        setattr(args, f"asynchzp_{state}_shard_size", getattr(sizes, state))
    return lines + change_settings(args)


def confirm_args(args: Namespace) -> None:
    """After Megatron's validation: raise ConfigurationError for what it switched on again."""
    refuse_unsupported(args)
    refuse_changes(args)


def refuse_yaml(argv: list[str], flag: str) -> None:
    """Raise ConfigurationError for --yaml-cfg, which drops `flag` with all others while parsing."""
    if {flag, "--yaml-cfg"} <= {word.partition("=")[0] for word in argv}:
        raise ConfigurationError(
            f"--yaml-cfg is not supported with {flag}: Megatron then ignores all other "
            f"flags, {flag} included; pass the settings as flags"
        )


def refuse_sizes(args: Namespace) -> None:
    """Raise ConfigurationError for a world or a batch that the parallel sizes do not divide."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    layers = {"tensor-model": tensor, "pipeline-model": pipeline}
    layers["context"] = args.context_parallel_size
    experts = {"expert-tensor": args.expert_tensor_parallel_size or tensor}
    experts |= {"expert-model": args.expert_model_parallel_size, "pipeline-model": pipeline}
    needed = lcm(prod(layers.values()), prod(experts.values()))
    for sizes in (layers, experts):
        if args.world_size % (size := prod(sizes.values())):
            flags = " x ".join(f"--{name}-parallel-size" for name in sizes)
            raise ConfigurationError(
                f"{args.world_size} ranks are not a multiple of {flags} = {size}; start {needed} "
                "ranks or a multiple of it"
            )
    data_size = args.world_size // prod(layers.values())
    micro, batch = args.micro_batch_size, args.global_batch_size
    is_rounded = args.decrease_batch_size_if_needed and batch and batch >= (micro or 1) * data_size
    if not is_rounded:
        _refuse_batch("global", batch, "micro", micro, data_size)
    eval_micro, evaluated = args.eval_micro_batch_size, args.eval_global_batch_size
    # By default it is that of training, before that is rounded.
    _refuse_batch(
        "eval-global",
        evaluated or batch,
        "eval-micro" if eval_micro else "micro",
        eval_micro or micro,
        data_size,
    )


def _refuse_batch(name: str, batch: int | None, per: str, micro: int | None, ranks: int) -> None:
    if micro and batch and batch % (micro * ranks):
        raise ConfigurationError(
            f"--{name}-batch-size {batch} is not a multiple of --{per}-batch-size {micro} x "
            f"{ranks} data-parallel ranks; use a multiple of {micro * ranks}"
        )


def refuse_missing_data(args: Namespace) -> None:
    """Raise ConfigurationError for a dataset that is missing or is none."""
    for flag, path in _argument_files(args):
        if not Path(path).is_file():
            raise ConfigurationError(f"{flag} {path}: no such file")
    for flag, prefix in _dataset_prefixes(args):
        if "://" in prefix:  # object storage: Megatron opens it itself
            continue
        needed = [prefix] if args.sft else [prefix + ".idx", prefix + ".bin"]
        missing = [path for path in needed if not Path(path).is_file()]
        if missing:
            raise ConfigurationError(
                f"{flag} {prefix}: no dataset there ({' and '.join(missing)} missing); {_MAKE_DATA}"
            )
        if not args.sft:
            _refuse_foreign_dataset(flag, prefix)


_MAKE_DATA = (
    "make one with our scripts/train/prepare_data.py or Megatron's tools/preprocess_data.py, and "
    "give its path without .idx or .bin"
)
# How the index of a dataset begins (megatron.core.datasets.indexed_dataset).
_INDEX_HEADER = b"MMIDIDX\x00\x00"


def _refuse_foreign_dataset(flag: str, prefix: str) -> None:
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    with index.open("rb") as file:
        header = file.read(len(_INDEX_HEADER))
    if header != _INDEX_HEADER:
        fault = "is empty" if not header else "is not the index of a Megatron dataset"
        raise ConfigurationError(f"{flag} {prefix}: {index.name} {fault}; {_MAKE_DATA}")
    if not data.stat().st_size:
        raise ConfigurationError(f"{flag} {prefix}: {data.name} is empty; {_MAKE_DATA}")


def refuse_useless_saves(args: Namespace) -> None:
    """Raise ConfigurationError for a --save that would fail at the first checkpoint, or after the
    last step."""
    if args.save and Path(args.save).exists() and not Path(args.save).is_dir():
        raise ConfigurationError(f"--save {args.save} is a file; name a folder")
    if args.save and args.save_interval is None:
        raise ConfigurationError(
            "--save without --save-interval: Megatron fails after the last step; add "
            "--save-interval STEPS"
        )
    _refuse_useless_local(args)
    if args.async_save and not args.save:
        raise ConfigurationError("--async-save without --save saves nothing; add --save FOLDER")
    uses_nvrx = args.use_persistent_ckpt_worker and args.async_strategy == "nvrx"
    if args.async_save and uses_nvrx:
        require("nvidia_resiliency_ext", "--async-save without --async-strategy mcore")


def _refuse_useless_local(args: Namespace) -> None:
    flag = "--non-persistent-ckpt-type local"
    if args.non_persistent_save_interval and not args.save:
        raise ConfigurationError(
            "--non-persistent-save-interval without --save saves nothing; add --save FOLDER"
        )
    if args.non_persistent_ckpt_type != "local":
        return
    if not args.non_persistent_local_ckpt_dir:
        raise ConfigurationError(
            f"{flag}: add --non-persistent-local-ckpt-dir DIR, a folder on each node's own disk or "
            "in its memory"
        )
    if args.replication and not args.replication_jump:
        raise ConfigurationError(
            "--replication: add --replication-jump RANKS: as many as a node has, so that copies "
            "are on other nodes"
        )
    if args.async_save:
        raise ConfigurationError(
            f"{flag} has not been tested with --async-save; leave one of them out"
        )
    require("nvidia_resiliency_ext", flag)


def refuse_unwritable_folders(args: Namespace) -> None:
    """Raise ConfigurationError for a folder into which this process, on its machine, may not write:
    Megatron makes it when the model has been built, or at the first checkpoint."""
    for name in ("save", "tensorboard_dir"):
        if not (word := getattr(args, name)) or "://" in word:
            continue
        path = Path(word).absolute()
        there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        if not there.is_dir():
            raise ConfigurationError(
                f"{_flag(name)} {word}: {there} is no folder; name another one"
            )
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"{_flag(name)} {word}: {there} cannot be written to; name another folder"
            )


def refuse_useless_load(args: Namespace) -> None:
    """Raise ConfigurationError for a --load or --pretrained-checkpoint that no checkpoint can be
    read from. A folder without any is a run from the beginning."""
    for name in ("load", "pretrained_checkpoint"):
        if getattr(args, name):
            _refuse_useless_folder(_flag(name), Path(getattr(args, name)))


def _refuse_useless_folder(flag: str, folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigurationError(f"{flag} {folder} is a file; name a folder of checkpoints")
    if all_of_format_torch(folder):
        raise ConfigurationError(f"{flag} {folder}: {OTHER_FORMAT}")
    if is_hugging_face(folder):
        raise ConfigurationError(
            f"{flag} {folder} is a model of Hugging Face, from which Megatron loads nothing; make "
            f"a checkpoint of it with asynchzp hf import --load {folder} --save FOLDER and give "
            f"{flag} FOLDER"
        )
    if _CHECKPOINT.fullmatch(folder.name) and (folder / "metadata.json").is_file():
        raise ConfigurationError(
            f"{flag} {folder} is one checkpoint; name the folder that it is in, and choose it with "
            "--ckpt-step"
        )


_CHECKPOINT = re.compile(r"iter_\d{7,}|release")


def refuse_missing_muon(args: Namespace) -> None:
    """Raise ConfigurationError for Muon without the package that holds its arithmetic."""
    if args.optimizer not in ("muon", "dist_muon"):
        return
    require("emerging_optimizers", f"--optimizer {args.optimizer}")
    from megatron.core.optimizer.emerging_optimizers import get_supported_coefficient_types

    try:
        known = get_supported_coefficient_types()
    except AssertionError as error:  # there, but not the one that Megatron imports from
        remedy = 'pip install --upgrade "megatron_asynchzp[muon]"'
        raise ConfigurationError(f"--optimizer {args.optimizer}: {error}; {remedy}") from error
    if args.muon_coefficient_type not in known:
        raise ConfigurationError(
            f"--muon-coefficient-type {args.muon_coefficient_type} is not known to the "
            f"emerging-optimizers that is installed; use one of {', '.join(known)}"
        )


def refuse_foreign_tokens(args: Namespace) -> None:
    """Raise ConfigurationError for data with ids of which the model has no row: in a sample of each
    dataset, in all of a small one. args: with padded_vocab_size."""
    size = args.padded_vocab_size
    if args.sft or args.mock_data or not size:
        return
    for flag, prefix in _dataset_prefixes(args):
        if "://" in prefix:
            continue
        seen = _ids_seen(Path(prefix + ".idx"), Path(prefix + ".bin"))
        if foreign := [one for one in seen if not 0 <= one < size]:
            raise ConfigurationError(
                f"{flag} {prefix}: it holds the token {foreign[-1]}, and the vocabulary has {size} "
                "with its padding; give --tokenizer-type, --tokenizer-model or --vocab-size as "
                "when it was made"
            )


def _ids_seen(index: Path, data: Path) -> list[int]:
    """The smallest and the largest token of what is looked at."""
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


def refuse_no_rank() -> None:
    """Raise ConfigurationError for a process that is to train and that nothing made a rank."""
    missing = [name for name in _OF_A_RANK if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} not set: this process is no rank of a run; start it with "
            "asynchzp launch --nproc-per-node N SCRIPT (or torchrun) on each node, also within srun"
        )


_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _argument_files(args: Namespace) -> list[tuple[str, str]]:
    names = ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path")
    names += ("vocab_file", "merge_file")
    if args.tokenizer_type in _TOKENIZERS_OF_A_FILE:
        names += ("tokenizer_model",)
    return [(_flag(name), getattr(args, name)) for name in names if getattr(args, name)]


_TOKENIZERS_OF_A_FILE = (
    "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer",
)  # fmt: skip


def _dataset_prefixes(args: Namespace) -> Iterable[tuple[str, str]]:
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    lists = [(name, getattr(args, name) or []) for name in names]
    if args.data_args_path:
        lists.append(("data_args_path", Path(args.data_args_path).read_text().split()))
    for name, words in lists:
        is_weighted = len(words) % 2 == 0 and all(map(_is_number, words[::2]))
        yield from ((_flag(name), prefix) for prefix in (words[1::2] if is_weighted else words))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
